"""accelerate, as training needs it."""

from __future__ import annotations

import os
from typing import Any

from moepress.errors import MoepressError
from moepress.recovery.options import RecoverOptions
from moepress.recovery.rows import Row
from moepress.recovery.sharding import load_everywhere
from moepress.registry import did_you_mean


def make_accelerator(options: RecoverOptions) -> Any:
    """The processes, devices and precision that accelerate was launched or configured with."""
    try:
        from accelerate import Accelerator
        from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin
    except ImportError:
        raise MoepressError("recovery needs the accelerate package: pip install accelerate") from None
    check_trackers(options)
    forget_settings()
    load_everywhere()
    accelerator = Accelerator(
        mixed_precision=options.mixed_precision,
        cpu=options.cpu,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=options.accumulate, sync_with_dataloader=False
        ),
        # Some experts may see no token of a step, and then have no gradient.
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
        log_with=list(options.trackers) or None,
        project_dir=options.log_dir,
    )
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    check_kind(str(accelerator.distributed_type), getattr(plugin, "fsdp_version", None))
    parts = accelerator.num_processes * options.accumulate
    if options.batch_size % parts:
        raise MoepressError(
            f"recover: batch_size {options.batch_size} cannot be shared among {accelerator.num_processes} processes "
            f"in {options.accumulate} parts each: make it a multiple of {parts}"
        )
    return accelerator


def check_kind(kind: str, fsdp_version: int | None = None) -> None:
    """Refuse the kinds of training that recovery cannot put together again, and sharding that would be left out."""
    kind = kind.upper()
    if any(name in kind for name in ("DEEPSPEED", "MEGATRON")) or ("FSDP" in kind and fsdp_version != 2):
        raise MoepressError(
            "recovery splits a model with FSDP2 only; FSDP1, DeepSpeed and Megatron are not supported: launch it with "
            "`accelerate launch --use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP`"
        )
    if "FSDP" not in kind and os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        raise MoepressError(
            "FSDP was asked for, and accelerate leaves it out on CPUs: launch recovery without it there"
        )


def forget_settings() -> None:
    """accelerate keeps the settings of the first training in a process: a later one may have others. Processes stay
    connected."""
    from accelerate.state import AcceleratorState, PartialState

    # Of FSDP accelerate makes a note in both, and would not set it up again.
    split = "FSDP" in str(PartialState._shared_state.get("distributed_type"))
    AcceleratorState._reset_state(reset_partial_state=split)


def shared(accelerator: Any, value: str) -> str:
    """What the first process says."""
    from accelerate.utils import broadcast_object_list

    return str(broadcast_object_list([value])[0]) if accelerator.num_processes > 1 else value


def check_trackers(options: RecoverOptions) -> None:
    """accelerate itself leaves out a tracker that is not installed, and says nothing."""
    if not options.trackers:
        return
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    known, installed = sorted(map(str, LOGGER_TYPE_TO_CLASS)), {str(name) for name in get_available_trackers()}
    for name in options.trackers:
        if name not in known:
            raise MoepressError(f"recover: unknown tracker {name!r}: {did_you_mean(name, known)}")
        if name not in installed:
            raise MoepressError(f"recover: the tracker {name!r} is not installed: pip install {name}")
        if LOGGER_TYPE_TO_CLASS[name].requires_logging_directory and options.log_dir is None:
            raise MoepressError(f"recover: the tracker {name!r} writes files: say where with log_dir")


def start_trackers(accelerator: Any, options: RecoverOptions) -> None:
    if options.trackers:
        accelerator.init_trackers("moepress", config=options.decisive())


def reported(loss: float, kl: float, has_teacher: bool, options: RecoverOptions, step: int) -> dict[str, float]:
    values = {"loss": loss, "learning rate": options.rate * options.factor(step)}
    return values | ({"kl": kl} if has_teacher else {})


def shares(picked: list[int], rows: list[Row], accelerator: Any, parts: int) -> list[list[int]]:
    """The rows that this process computes in each part of a step; rows of about one length stand together."""
    by_length = sorted(picked, key=lambda i: len(rows[i]["input_ids"]))
    mine = by_length[accelerator.process_index :: accelerator.num_processes]
    size = len(mine) // parts
    return [mine[part * size : (part + 1) * size] for part in range(parts)]
