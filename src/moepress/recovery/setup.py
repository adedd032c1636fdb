"""accelerate, as training needs it."""

from __future__ import annotations

from typing import Any

from moepress.errors import MoepressError
from moepress.recovery.options import RecoverOptions
from moepress.recovery.rows import Row
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
    check_kind(str(accelerator.distributed_type))
    parts = accelerator.num_processes * options.accumulate
    if options.batch_size % parts:
        raise MoepressError(
            f"recover: batch_size {options.batch_size} cannot be shared among {accelerator.num_processes} processes "
            f"in {options.accumulate} parts each: make it a multiple of {parts}"
        )
    return accelerator


def check_kind(kind: str) -> None:
    """Sharded weights would have to be put together again before anything can be kept or written."""
    if any(name in kind.upper() for name in ("FSDP", "DEEPSPEED", "MEGATRON")):
        raise MoepressError(
            "recovery trains on one process or on several with a whole copy of the model each (DDP); FSDP, DeepSpeed "
            "and Megatron are not supported: launch it with `accelerate launch --multi_gpu`"
        )


def forget_settings() -> None:
    """accelerate keeps the settings of the first training in a process: a later one may have others. Processes stay
    connected."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()


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
