"""Distillation, on accelerate: whatever `accelerate launch` or `accelerate config` set up is used."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moepress.errors import MoepressError
from moepress.evaluation.logits import check_same_vocabulary
from moepress.evaluation.precision import in_dtype
from moepress.models.implementation import quickest_experts
from moepress.models.parameters import only_training
from moepress.models.walk import CalibrationBatch, without_cache
from moepress.progress import track
from moepress.recovery.hook import TrainingHook
from moepress.recovery.loss import all_finite, at_targets, cross_entropy, distillation
from moepress.recovery.options import BETAS, EPSILON, RecoverOptions, RecoverReport
from moepress.recovery.parameters import Kept, checkpointed, local, trained_parameters
from moepress.recovery.rows import Order, Row, digest, held_apart, rows_of, silent, targets, together
from moepress.recovery.setup import make_accelerator, reported, shared, shares, start_trackers
from moepress.recovery.sharding import check_alike, check_sharding, gather_into, shard
from moepress.recovery.state import Progress, SavedState, check_state
from moepress.recovery.teacher import Answers, Live, Remembered


def recover(
    student: PreTrainedModel,
    teacher: PreTrainedModel | None,
    batches: list[CalibrationBatch],
    options: RecoverOptions | None = None,
    hooks: Sequence[TrainingHook] = (),
    *,
    held_out: list[CalibrationBatch] | None = None,
    state: str | Path | None = None,
    resume: bool = False,
) -> RecoverReport:
    """Train the student in place to answer like the teacher; its class, shape and precision stay what they are.

    Without a teacher only the task objective with alpha=0 is possible: plain fine-tuning. If the loss is no longer
    finite, training stops and the student keeps the last weights that were good. `held_out`: samples to judge by
    instead of a share of the others. `state`: a folder from which a killed run goes on (`resume`) to the same end.
    """
    options = options or RecoverOptions()
    if teacher is not None:
        check_same_vocabulary(student, teacher)
    elif options.objective == "text" or options.alpha:
        raise MoepressError("distillation needs a teacher; without one use objective='task' and alpha=0")
    if state is not None:
        check_state(Path(state), None, resume)
    rows = rows_of(batches, options.objective)
    if held_out is None:
        rows, judged = held_apart(rows, options.hold_out, options.seed)
    else:
        judged = rows_of(held_out, options.objective)
    parameters = trained_parameters(student, options.train)
    accelerator = make_accelerator(options)
    split = bool(accelerator.is_fsdp2)
    if split:
        check_sharding(accelerator, student, hooks)
    here = [model for model in (None if split else student, teacher) if model is not None]
    for given in here:
        if not hasattr(given, "hf_device_map"):
            given.to(accelerator.device)  # type: ignore[arg-type]
    optimize = partial(torch.optim.AdamW, lr=options.rate, betas=BETAS, eps=EPSILON, weight_decay=options.weight_decay)
    with ExitStack() as stack:
        for model in here:
            stack.enter_context(without_cache(model))
            stack.enter_context(quickest_experts(model, accelerator.device))
        if teacher is not None:
            stack.enter_context(in_dtype(teacher, torch.float32 if options.teacher_dtype == "float32" else None))
        if split:
            check_alike(accelerator, student, "student")
            if teacher is not None:
                check_alike(accelerator, teacher, "teacher")
            prepared, optimizer = shard(accelerator, student, options.train, options.checkpointing, optimize)
        else:
            stack.enter_context(in_dtype(student, torch.float32))
            stack.enter_context(only_training(student, parameters))
            if options.checkpointing:
                stack.enter_context(checkpointed(student))
            prepared, optimizer = accelerator.prepare(student, optimize(parameters))
        stack.callback(_release, accelerator, prepared, student)
        training = Training(accelerator, prepared, optimizer, rows, judged, options, hooks)
        if teacher is not None:
            place = Path(state or shared(accelerator, stack.enter_context(tempfile.TemporaryDirectory())))
            training.teach(teacher, place / "teacher")
        if state is not None:
            training.keep_in(Path(state), resume)
        report = training.run()
        if split:
            gather_into(student, prepared)
        return report


def _release(accelerator: Any, prepared: Any, student: PreTrainedModel) -> None:
    for tracker in accelerator.trackers:
        tracker.finish()
    accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    student.__dict__.pop("_is_accelerate_prepared", None)  # or a second run would not be prepared
    accelerator.free_memory()


class Training:
    """One run: its steps, its looks at held-out samples, and what it keeps."""

    def __init__(
        self,
        accelerator: Any,
        model: Any,
        optimizer: Any,
        rows: list[Row],
        judged: list[Row],
        options: RecoverOptions,
        hooks: Sequence[TrainingHook],
    ) -> None:
        self.accelerator, self.model, self.optimizer = accelerator, model, optimizer
        self.rows, self.learnt = [*rows, *judged], len(rows)
        self.options, self.hooks = options, hooks
        self.order = Order(len(rows), options.batch_size, options.seed)
        self.at_once = options.batch_size // (accelerator.num_processes * options.accumulate)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.good, self.best = Kept(self.parameters), Kept(self.parameters)
        self.progress = Progress()
        self.answers: Answers | None = None
        self.saved: SavedState | None = None

    @property
    def report(self) -> RecoverReport:
        return self.progress.report

    def teach(self, teacher: PreTrainedModel, folder: Path) -> None:
        live, options = Live(teacher), self.options
        self.answers = live
        if options.cache != "none":
            steps = range(1, min(options.steps, -(-self.learnt // options.batch_size)) + 1)
            needed = {i for step in steps for i in self.order(step)} | set(range(self.learnt, len(self.rows)))
            self.answers = Remembered(
                live,
                self.rows,
                sorted(needed),
                options.cache,
                options.softening,
                folder,
                self.accelerator,
                self.at_once,
            )

    def keep_in(self, folder: Path, resume: bool) -> None:
        shapes = [tuple(parameter.shape) for parameter in self.parameters]
        asked = self.options.decisive() | {"data": digest(self.rows), "trained": str(shapes)}
        if self.accelerator.is_fsdp2:
            asked["sharding"] = f"FSDP2, {self.accelerator.state.fsdp_plugin.state_dict_type.name}"
        self.saved = SavedState(folder, asked, self.accelerator, self.progress, self.hooks)
        self.saved.begin(resume, self.best)

    def run(self) -> RecoverReport:
        options, progress = self.options, self.progress
        start_trackers(self.accelerator, options)
        if self.answers is not None:
            self.report.cache_bytes = self.answers.bytes
        if not progress.step and self.look():
            raise MoepressError("recover: the student's loss on held-out samples is not finite before training")
        for step in track(range(progress.step + 1, options.steps + 1), "recover"):
            if progress.waited >= options.patience:
                self.report.stopped = f"no improvement on held-out samples in {progress.waited} looks"
                break
            if (reason := self.step(step)) is not None:
                self.report.stopped = reason
                break
            progress.step = step
            if step % options.evaluate_every == 0 or step == options.steps:
                self.look()
            if self.saved is not None and step % options.save_every == 0 and step < options.steps:
                self.saved.save(self.best)
        if self.report.stopped is None and not self.finite():  # nobody has seen the last update yet
            self.report.stopped = "the last update made weights that are not finite"
            self.good.restore()
        if self.report.best is not None and self.report.best != progress.step:
            self.best.restore()
        for hook in self.hooks:
            hook.finish()
        return self.report

    def step(self, step: int) -> str | None:
        """One update of the weights; the reason, if none could be made."""
        accelerator, options = self.accelerator, self.options
        picked = self.order(step)
        tokens = sum(targets(self.rows[i]) for i in picked)
        sums = torch.zeros(2, dtype=torch.float64)
        # accelerate averages over processes and parts; the loss is a mean over all tokens of the step.
        scale = accelerator.num_processes * options.accumulate / tokens
        for group in shares(picked, self.rows, accelerator, options.accumulate):
            with accelerator.accumulate(self.model):
                loss, kl = self.losses(group, together([self.rows[i] for i in group]))
                accelerator.backward(loss * scale)
            sums += torch.stack([loss.detach().double().cpu(), kl.detach().double().cpu()])
        value, divergence = (self.summed(sums) / tokens).tolist()
        if not math.isfinite(value):
            if self.good.copies is not None:
                self.good.restore()
            return f"the loss of step {step} is {value}"
        self.good.save()
        for hook in self.hooks:
            hook.after_backward(step)
        norm = accelerator.clip_grad_norm_(self.parameters, options.clip)
        # In fp16 such gradients are usual: there the scaler skips the step by itself.
        if accelerator.scaler is None and not math.isfinite(float(norm)):
            return f"the gradient of step {step} is not finite"
        for group in self.optimizer.param_groups:
            group["lr"] = options.rate * options.factor(step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for hook in self.hooks:
            hook.after_step(step)
        self.report.loss.append(value)
        if self.answers is not None:
            self.report.kl.append(divergence)
        accelerator.log(reported(value, divergence, self.answers is not None, options, step), step=step)
        return None

    def losses(self, numbers: list[int], batch: Row) -> tuple[Tensor, Tensor]:
        """The loss, and the KL within it, as sums over the tokens that count."""
        batch = {name: tensor.to(self.accelerator.device) for name, tensor in batch.items()}
        labels_BL = batch["labels"]
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        student_TV = at_targets(self.model(**inputs).logits, labels_BL)
        kl = student_TV.new_zeros(())
        learns = self.options.objective == "text" or self.options.alpha > 0
        if self.answers is not None:
            # With alpha = 0 the KL is still reported, but nothing is learnt from it.
            with nullcontext() if learns else torch.no_grad():
                kl = distillation(student_TV, self.answers(numbers, batch), self.options.softening)
        if self.options.objective == "text":
            return kl, kl
        loss = cross_entropy(student_TV, labels_BL)
        return (loss + self.options.alpha * kl if learns else loss), kl

    def look(self) -> bool:
        """Judge the weights by the held-out samples and keep the best. Returns whether the loss is not finite."""
        progress, report = self.progress, self.report
        if self.learnt == len(self.rows):
            return False
        value = self.held_loss()
        report.held_out.append((progress.step, value))
        self.accelerator.log({"held-out loss": value}, step=progress.step)
        if not all(hook.settled(progress.step) for hook in self.hooks):
            progress.best_loss, progress.waited, report.best = math.inf, 0, None
        elif value < progress.best_loss:
            progress.best_loss, progress.waited, report.best = value, 0, progress.step
            self.best.save()
        else:
            progress.waited += 1
        return not math.isfinite(value)

    @torch.no_grad()
    def held_loss(self) -> float:
        rank, processes = self.accelerator.process_index, self.accelerator.num_processes
        numbers = sorted(range(self.learnt, len(self.rows)), key=lambda i: len(self.rows[i]["input_ids"]))
        tokens = sum(targets(self.rows[i]) for i in numbers)
        sums = torch.zeros(2, dtype=torch.float64)
        for start in range(0, len(numbers), self.at_once * processes):
            group = numbers[start : start + self.at_once * processes][rank::processes]
            # All processes run the model together, also one that has nothing left.
            batch = together([self.rows[i] for i in group] or [silent(self.rows[numbers[0]])])
            loss, kl = self.losses(group, batch)
            sums += torch.stack([loss.double().cpu(), kl.double().cpu()])
        return float(self.summed(sums)[0] / tokens)

    def finite(self) -> bool:
        """Whether all weights are, in every process."""
        bad = torch.tensor([float(not all_finite(map(local, self.parameters)))])
        return not float(self.summed(bad))

    def summed(self, sums: Tensor) -> Tensor:
        return self.accelerator.reduce(sums.to(self.accelerator.device), "sum").cpu()
