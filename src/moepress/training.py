"""The public functions that train: recovery of a smaller model, and the full model that teaches it."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from moepress import __version__
from moepress.api import open_source
from moepress.checkpoint.compact import compact_specs, save_compact
from moepress.checkpoint.companions import copy_companions
from moepress.checkpoint.folder import output_folder, refuse_output
from moepress.checkpoint.load import quiet
from moepress.checkpoint.wording import keep_wording
from moepress.data.batches import CalibrationData, calibration_batches
from moepress.errors import MoepressError
from moepress.hook import TrainingHook
from moepress.models.visit import CalibrationBatch
from moepress.records import records_in, write_training
from moepress.recovery import RecoverOptions, RecoverReport
from moepress.recovery import recover as train
from moepress.recovery.sharding import load_everywhere
from moepress.recovery.state import check_state
from moepress.registry import did_you_mean
from moepress.report import RECORDS, records_beside

AnyPath = str | os.PathLike[str]
JUDGED = 512
"""Examples of a task's validation split that training is judged by."""


@dataclass
class Recovered:
    """The result of `recover`: the model, how training went, and where it was written."""

    model: PreTrainedModel
    report: RecoverReport
    made: dict[str, Any]
    """What was trained on what, for the records."""
    folder: Path | None = None


def recover(
    student: AnyPath | PreTrainedModel,
    out: AnyPath | None = None,
    *,
    teacher: AnyPath | PreTrainedModel | None = None,
    data: str | None = None,
    task: str | None = None,
    samples: int | str = "all",
    length: int = 512,
    epochs: float | None = None,
    hooks: Sequence[TrainingHook] = (),
    tokenizer: Any = None,
    resume: bool = False,
    overwrite: bool = False,
    device: str | None = None,
    max_shard_size: int | str = "5GB",
    **options: Any,
) -> Recovered:
    """Train a compressed model to answer like the one it was made of and, with `out`, write it.

    `student` is a folder, a Hub name, or a model in memory, which is then changed in place. `data` is text as for
    calibration, of which a share is held out to judge by; `task` a labelled task (`sst2` or `sst2@FOLDER`), judged by
    its validation split. `epochs` counts rounds through the samples, instead of `steps`. `options` are those of
    `RecoverOptions`. Launched by accelerate, all processes call this alike. `resume` goes on with a run that was
    killed; its state lies in a hidden folder beside `out` until the output is complete.
    """
    if (data is None) == (task is None):
        raise MoepressError("recover on either text (data) or a task")
    options.setdefault("objective", "text" if task is None else "task")
    chosen = make_options(options, device)
    if teacher is None and (chosen.objective == "text" or chosen.alpha):
        raise MoepressError("distillation needs a teacher; without one use a task and alpha=0")
    source = None if isinstance(student, PreTrainedModel) else student
    state = None if out is None else claim(out, overwrite, source, resume)
    load_everywhere()
    loaded, tokenizer, _ = open_source(student, tokenizer, None, False, None)
    original = None if teacher is None else open_source(teacher, None, None, False, None)[0]
    learnt, judged = read(data, task, samples, length, tokenizer, loaded, chosen)
    if epochs is not None:
        chosen = replace(chosen, steps=steps_of(epochs, learnt, chosen.batch_size))
    report = train(loaded, original, learnt, chosen, hooks, held_out=judged, state=state, resume=resume)
    made = record(student, teacher, data or f"task:{task}", samples, length, chosen.decisive(), report)
    result = Recovered(loaded, report, made)
    if out is not None:
        result.folder = Path(out)
        write(loaded, result.folder, source, [made], overwrite, max_shard_size)
        discard(state)
    return result


def record(
    student: AnyPath | PreTrainedModel,
    teacher: AnyPath | PreTrainedModel | None,
    data: str,
    samples: int | str,
    length: int,
    options: dict[str, Any],
    report: RecoverReport,
) -> dict[str, Any]:
    return {
        "moepress": __version__,
        "student": named(student),
        "teacher": None if teacher is None else named(teacher),
        "data": data,
        "samples": samples,
        "length": length,
        "options": options,
        "report": report.to_dict(),
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate")},
    }


def make_options(options: dict[str, Any], device: str | None) -> RecoverOptions:
    known = list(RecoverOptions.__dataclass_fields__)
    if unknown := [name for name in options if name not in known]:
        raise MoepressError(f"recover: unknown option {unknown[0]!r}: {did_you_mean(unknown[0], known)}")
    return RecoverOptions(**options | ({"cpu": True} if device == "cpu" else {}))


def claim(out: AnyPath, overwrite: bool, source: AnyPath | None, resume: bool) -> Path:
    """The folder of a run's state, if the output may be written and an earlier state is wanted."""
    refuse_output(out, overwrite, source)
    target = Path(os.path.realpath(out))
    state = target.with_name(f".{target.name}.training")
    check_state(state, None, resume)
    return state


def discard(state: Path | None) -> None:
    if state is not None and is_main():
        shutil.rmtree(state, ignore_errors=True)


def is_main() -> bool:
    from accelerate import PartialState

    return bool(PartialState().is_main_process)


def read(
    data: str | None,
    task: str | None,
    samples: int | str,
    length: int,
    tokenizer: Any,
    model: PreTrainedModel,
    options: RecoverOptions,
) -> tuple[list[CalibrationBatch], list[CalibrationBatch] | None]:
    """What is learnt from and, if it is something of its own, what is judged by."""
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    asked = CalibrationData(source=data or f"task:{task}", samples=samples, length=length, seed=options.seed)  # type: ignore[arg-type]
    learnt = calibration_batches(asked, tokenizer, model.config, shift=shift)
    if task is None or not options.hold_out:
        return learnt, None
    held = CalibrationData(source=f"task:{task}", samples=JUDGED, length=length)
    return learnt, calibration_batches(held, tokenizer, model.config, split="validation", shift=shift)


def steps_of(epochs: float, batches: list[CalibrationBatch], batch_size: int) -> int:
    if not epochs > 0:
        raise MoepressError(f"recover: epochs must be above 0, not {epochs}")
    return math.ceil(epochs * sum(len(batch.inputs["input_ids"]) for batch in batches) / batch_size)


def named(model: AnyPath | PreTrainedModel) -> str:
    return f"{type(model).__name__} in memory" if isinstance(model, PreTrainedModel) else os.fspath(model)


def write(
    model: PreTrainedModel,
    out: Path,
    source: AnyPath | None,
    made: list[dict[str, Any]],
    overwrite: bool,
    max_shard_size: int | str,
) -> None:
    """The trained model in the format that it had, with the records that it had and how it was trained."""
    from accelerate import PartialState

    if is_main():
        specs = compact_specs(model)
        before = records_in(source, compact=bool(specs))
        with output_folder(out, overwrite=overwrite, source=source) as folder, quiet():
            if specs:
                save_compact(model, specs, folder, source=source, max_shard_size=max_shard_size)
                write_training(folder, folder / RECORDS, made, title=out.name, source=source, before=before)
            else:
                model.save_pretrained(os.fspath(folder), max_shard_size=max_shard_size)
                if source is not None:
                    copy_companions(source, folder)
                    keep_wording(source, folder, type(model.config))
        if not specs:  # nothing of moepress in the folder itself
            shutil.rmtree(records_beside(out), ignore_errors=True)  # of an output that was replaced
            write_training(out, records_beside(out), made, title=out.name, source=source, before=before)
    PartialState().wait_for_everyone()
