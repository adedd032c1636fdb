"""Training with weights, gradients and moments split over the processes: FSDP2, as accelerate configures it.

What is split is a copy of the student; the student itself stays whole where it is and gets the trained weights at the
end, in its own precision, one tensor at a time.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moepress.errors import MoepressError
from moepress.models.implementation import quickest_experts
from moepress.models.precision import NARROW
from moepress.models.walk import without_cache
from moepress.recovery.hook import TrainingHook
from moepress.recovery.parameters import checkpointed, trained_parameters

LOADING = "FSDP_CPU_RAM_EFFICIENT_LOADING"
"""Makes transformers fill the weights of the first process only. The others need theirs: they split their own copy."""


def load_everywhere() -> None:
    """To be called before a model is loaded: every process reads the weights."""
    if LOADING in os.environ:
        os.environ[LOADING] = "false"


def check_sharding(accelerator: Any, student: PreTrainedModel, hooks: Sequence[TrainingHook]) -> None:
    """Refuse what FSDP2 is not used with here."""
    if names := shared_beyond_head(student):
        raise MoepressError(
            f"FSDP2 cannot split {names[0]!r}, which more modules share than the embedding and the head: train on one "
            "process, or on several with a whole copy each (`accelerate launch --multi_gpu`)"
        )
    if hooks:
        raise MoepressError(
            f"{type(hooks[0]).__name__} needs whole weights in every process, and FSDP2 splits them: train on one "
            "process, or on several with a whole copy each (`accelerate launch --multi_gpu`)"
        )
    if accelerator.mixed_precision == "fp16":
        raise MoepressError("recovery with FSDP2 has no fp16: use mixed_precision bf16 or no")
    if accelerator.state.fsdp_plugin.activation_checkpointing:
        raise MoepressError(
            "activation checkpointing is recovery's own option (checkpointing): switch it off in the settings of FSDP"
        )


def shared_beyond_head(model: PreTrainedModel) -> list[str]:
    """Weights that stand in several modules. Of those, accelerate keeps an embedding and its head together only."""
    places: dict[int, list[tuple[int, str]]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((id(module), f"{prefix}.{name}".lstrip(".")))
    pair = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    return [found[0][1] for found in places.values() if len(found) > 1 and not {owner for owner, _ in found} <= pair]


def shard(
    accelerator: Any, student: PreTrainedModel, train: str, checkpointing: bool, optimize: Callable[..., Any]
) -> tuple[Any, Any]:
    """A copy of the student, split over the processes, and its optimizer. No name may go on holding the whole
    parameters: they are freed while they are split."""
    model: Any = copy.deepcopy(student)
    make_ready(model, train)
    settings = ExitStack()
    settings.enter_context(without_cache(model))
    settings.enter_context(quickest_experts(model, accelerator.device))
    if checkpointing:
        settings.enter_context(checkpointed(model))
    settings.pop_all()  # the copy is thrown away, so that nothing has to be put back
    optimizer = optimize([parameter for parameter in model.parameters() if parameter.requires_grad])
    try:
        model, optimizer = accelerator.prepare(model, optimizer)
    except (ValueError, NotImplementedError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise MoepressError(f"FSDP2 cannot split a {type(student).__name__}: {reason}") from error
    for unit in units(model):
        if any(True for _ in unit.children()):  # an embedding, a norm or a head is reached anyway
            reach_all(unit)
    return model, optimizer


def make_ready(model: nn.Module, train: str) -> None:
    """fp32 weights, gradients for what is trained; no dropout and no router noise, as the teacher has none either."""
    wanted = {id(parameter) for parameter in trained_parameters(model, train)}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in wanted)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dtype in NARROW:
            tensor.data = tensor.data.float()
    model.eval()


def units(model: nn.Module) -> list[Any]:
    """The modules whose weights are split and brought together as one."""
    from torch.distributed.fsdp import FSDPModule

    found = [module for module in model.modules() if isinstance(module, FSDPModule)]
    names = {id(module): name for name, module in model.named_modules()}
    for module in found:
        if ".experts." in f".{names[id(module)]}.":
            raise MoepressError(
                f"FSDP2 was asked to wrap {names[id(module)]!r} by itself, and processes whose tokens do not reach "
                "it would wait for ever: use fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP, which wraps whole layers"
            )
    return found


def reach_all(unit: nn.Module) -> None:
    """Every process must have a gradient for every weight of a unit, or their sums would be of different tensors: an
    expert that no token of a process reached gets zeros."""
    own = list(places(unit))

    def reach(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        if not torch.is_grad_enabled():
            return output
        weights = [weight for module, name in own if (weight := getattr(module, name)).requires_grad]
        return linked(output, weights) if weights else output

    unit.register_forward_hook(reach, prepend=True)  # before the weights are given back


def places(unit: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Where a unit's own parameters stand: FSDP2 exchanges the objects."""
    from torch.distributed.fsdp import FSDPModule

    waiting = [unit]
    while waiting:
        module = waiting.pop()
        yield from ((module, name) for name, _ in module.named_parameters(recurse=False))
        waiting.extend(child for child in module.children() if not isinstance(child, FSDPModule))


def linked(output: Any, weights: list[Tensor]) -> Any:
    """The output, depending on the weights with a gradient of zero."""
    if isinstance(output, Tensor):
        return _Linked.apply(output, *weights)
    if isinstance(output, tuple):
        return (linked(output[0], weights), *output[1:])
    if "logits" in output:
        output["logits"] = linked(output["logits"], weights)
        return output
    raise MoepressError(f"FSDP2: an output of type {type(output).__name__} is not known")


class _Linked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, *weights: Tensor) -> Tensor:
        ctx.weights = [(weight.shape, weight.dtype, weight.device) for weight in weights]
        return output.clone()  # FSDP2 takes no views

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        zeros = (torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.weights)
        return (*gradients, *zeros)


@torch.no_grad()
def gather_into(student: nn.Module, model: nn.Module) -> None:
    """The trained weights, whole, into the student of every process."""
    for unit in units(model):
        unit.reshard()  # what lies there whole may be older than the parts
    trained: dict[str, Any] = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    for name, parameter in student.named_parameters():
        if name in trained:
            parameter.copy_(trained.pop(name).full_tensor())
    if trained:
        raise AssertionError(f"not in the student: {sorted(trained)}")


@torch.no_grad()
def check_alike(accelerator: Any, model: nn.Module, who: str) -> None:
    """Each process brings its own copy of the weights: they must be the same."""
    sums = torch.stack([parameter.double().sum().cpu() for parameter in model.parameters()])
    said = accelerator.gather(sums.to(accelerator.device)[None]).cpu()
    if not bool((said == said[:1]).all() | said.isnan().any()):
        raise MoepressError(f"the processes hold different weights of the {who}: load them with {LOADING}=false")
