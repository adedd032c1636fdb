"""Distillation, on accelerate: whatever `accelerate launch` or `accelerate config` set up is used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from moepress.errors import MoepressError
from moepress.evaluation.logits import check_same_vocabulary
from moepress.evaluation.precision import evaluating, in_dtype
from moepress.models.walk import CalibrationBatch
from moepress.progress import track
from moepress.recovery.hook import TrainingHook
from moepress.recovery.loss import all_finite, at_targets, cross_entropy, distillation
from moepress.recovery.options import RecoverOptions, RecoverReport
from moepress.recovery.parameters import LastGood, only_training, trained_parameters
from moepress.recovery.rows import Row, endless, rows_of, together


def recover(
    student: PreTrainedModel,
    teacher: PreTrainedModel | None,
    batches: list[CalibrationBatch],
    options: RecoverOptions | None = None,
    hooks: Sequence[TrainingHook] = (),
) -> RecoverReport:
    """Train the student in place to answer like the teacher; its class, shape and precision stay what they are.

    Without a teacher only the task objective with alpha=0 is possible: plain fine-tuning. If the loss is no longer
    finite, training stops and the student keeps the last weights that were good.
    """
    options = options or RecoverOptions()
    try:
        from accelerate import Accelerator
        from accelerate.utils import DistributedDataParallelKwargs
    except ImportError:
        raise MoepressError("recovery needs the accelerate package: pip install accelerate") from None
    if teacher is not None:
        check_same_vocabulary(student, teacher)
    elif options.objective == "text" or options.alpha:
        raise MoepressError("distillation needs a teacher; without one use objective='task' and alpha=0")
    order = torch.Generator().manual_seed(options.seed)
    loader: Any = DataLoader(
        rows_of(batches, options.objective),  # type: ignore[arg-type]
        options.batch_size,
        shuffle=True,
        generator=order,
        collate_fn=together,
    )
    parameters = trained_parameters(student, options.train)
    # Some experts may see no token of a step, and then have no gradient.
    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    for given in (student, teacher):
        if given is not None and not hasattr(given, "hf_device_map"):
            given.to(accelerator.device)  # type: ignore[arg-type]
    with ExitStack() as stack:
        stack.enter_context(in_dtype(student, torch.float32))
        stack.enter_context(only_training(student, parameters))
        if teacher is not None:
            stack.enter_context(in_dtype(teacher, torch.float32 if options.teacher_dtype == "float32" else None))
        optimizer = torch.optim.AdamW(
            parameters, options.lr, betas=(0.9, 0.98), eps=1e-6, weight_decay=options.weight_decay
        )
        model, optimizer, loader = accelerator.prepare(student, optimizer, loader)
        try:
            return _train(accelerator, model, teacher, optimizer, loader, parameters, options, hooks)
        finally:
            accelerator.unwrap_model(model, keep_fp32_wrapper=False)
            student.__dict__.pop("_is_accelerate_prepared", None)  # or a second run would not be prepared
            accelerator.free_memory()


def _train(
    accelerator: Any,
    model: Any,
    teacher: PreTrainedModel | None,
    optimizer: Any,
    loader: Any,
    parameters: list[torch.nn.Parameter],
    options: RecoverOptions,
    hooks: Sequence[TrainingHook],
) -> RecoverReport:
    report = RecoverReport()
    schedule = torch.optim.lr_scheduler.LambdaLR(getattr(optimizer, "optimizer", optimizer), _rate(options))
    good = LastGood(parameters)
    stream = endless(loader)
    for step in track(range(1, options.steps + 1), "recover"):
        loss, kl = _loss(model, teacher, next(stream), options)
        value = float(accelerator.reduce(loss.detach(), "mean"))
        if not math.isfinite(value):
            report.stopped = f"the loss of step {step} is {value}"
            good.restore()
            break
        good.save()
        accelerator.backward(loss)
        for hook in hooks:
            hook.after_backward(step)
        norm = accelerator.clip_grad_norm_(parameters, options.clip)
        # In fp16 such gradients are usual: there the scaler skips the step by itself.
        if accelerator.scaler is None and not math.isfinite(float(norm)):
            report.stopped = f"the gradient of step {step} is not finite"
            break
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        for hook in hooks:
            hook.after_step(step)
        report.loss.append(value)
        if kl is not None:
            report.kl.append(float(accelerator.reduce(kl.detach(), "mean")))
    if report.stopped is None and not all_finite(parameters):  # nobody has looked at the last update yet
        report.stopped = "the last update made weights that are not finite"
        good.restore()
    for hook in hooks:
        hook.finish()
    return report


def _loss(
    model: Any, teacher: PreTrainedModel | None, row: Row, options: RecoverOptions
) -> tuple[Tensor, Tensor | None]:
    """The loss, and the KL within it."""
    labels_BL = row.pop("labels")
    student_TV = at_targets(model(**row).logits, labels_BL)
    kl = None
    if teacher is not None:
        with evaluating(teacher, dtype=None):
            teacher_TV = at_targets(teacher(**row).logits, labels_BL)
        # With alpha = 0 the KL is still reported, but nothing is learnt from it.
        learns = options.objective == "text" or options.alpha > 0
        with nullcontext() if learns else torch.no_grad():
            kl = distillation(student_TV, teacher_TV, options.softening)
    if options.objective == "text":
        assert kl is not None
        return kl, kl
    loss = cross_entropy(student_TV, labels_BL)
    return (loss + options.alpha * kl if kl is not None and options.alpha else loss), kl


def _rate(options: RecoverOptions) -> Any:
    """Linear warm-up, then linear decay, as a factor of the learning rate."""
    warmup = min(options.warmup, options.steps // 2)

    def factor(done: int) -> float:
        if done < warmup:
            return (done + 1) / (warmup + 1)
        return max(0.0, (options.steps - done) / max(1, options.steps - warmup))

    return factor
