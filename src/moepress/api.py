"""The public functions: what the command line does, for Python."""

from __future__ import annotations

import os
import platform
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from moepress import __version__
from moepress.budget import need, within
from moepress.checkpoint.asked import what_decides
from moepress.checkpoint.compact import compact_specs, save_compact
from moepress.checkpoint.companions import copy_companions
from moepress.checkpoint.folder import job_folder, output_folder
from moepress.checkpoint.hub import hub_name
from moepress.checkpoint.job import Job
from moepress.checkpoint.load import (
    COMPACT_ALREADY,
    load_model,
    load_skeleton,
    load_tokenizer,
    local_folder,
    quiet,
    refuse_quantised,
)
from moepress.checkpoint.paging import PagedWeights
from moepress.checkpoint.shared import job_of
from moepress.checkpoint.sizes import Sizes, sizes_of
from moepress.checkpoint.vanilla import save_vanilla
from moepress.checkpoint.wording import keep_wording
from moepress.command import compress_command
from moepress.data.batches import calibration_batches, fingerprint_of
from moepress.decompose.stable_rank import mean_ranks
from moepress.errors import MoepressError
from moepress.fit import (
    bytes_from,
    check_fit,
    check_shared,
    check_smaller,
    check_whole,
    needs_text,
    needs_whole,
    shard_bytes,
)
from moepress.memory import give_back_at_once
from moepress.models.find import find_layers
from moepress.models.shelf import Spill
from moepress.models.weights import Weights
from moepress.observe import Statistics
from moepress.pipeline import Outcome, planner_of, press
from moepress.plan import Plan
from moepress.recipe import Recipe, load_recipe, make_recipe
from moepress.records import write_export, write_records
from moepress.report import RECORDS, draw_report, records_beside
from moepress.team import current, in_processes

PLACE = {"--plan": "plan.json", "--statistics": "statistics"}
"""Where values that were given in memory are saved."""


@dataclass
class Compressed:
    """The result of `compress`: where it was written, and how it came about."""

    outcome: Outcome
    before: Sizes
    after: Sizes
    folder: Path | None = None
    name: str = ""
    """Of the model that was compressed."""
    base_model: str | None = None
    """Its name on the Hub, if it came from there."""
    command: str = ""
    """What makes the output again."""
    page: Path | None = None
    """The report."""

    @cached_property
    def model(self) -> PreTrainedModel:
        """The compressed model: in memory, or else loaded from where it was written."""
        if isinstance(Weights.of(self.outcome.model), PagedWeights):
            assert self.folder is not None
            return load_model(self.folder)
        return self.outcome.model

    def report(self) -> dict[str, Any]:
        outcome = self.outcome
        return {
            "moepress": __version__,
            "model": self.name,
            "base_model": self.base_model,
            "command": self.command,
            "method": outcome.recipe.method,
            "format": outcome.recipe.format,
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
            "experts": {layer.name: [layer.experts, layer.physical] for layer in outcome.plan.layers},
            "worst_alignment_gap": max(outcome.gaps.values(), default=0.0),
            "alignment_gap": outcome.gaps,
            "output_error": outcome.output_error,
            "picked": outcome.picked,
            "stable_rank": {
                name: {when: mean_ranks(ranks) for when, ranks in both.items()}
                for name, both in outcome.stable_ranks.items()
            },
            "remaining": outcome.remaining,
            "notes": outcome.notes,
            "alignments": dict(sorted(outcome.solved.items())),
            "seconds": {stage: round(seconds, 3) for stage, seconds in outcome.seconds.items()},
            "memory": outcome.memory,
            "versions": {name: version(name) for name in ("torch", "transformers", "safetensors")}
            | {"python": platform.python_version()},
        }


@in_processes
def compress(
    model: str | os.PathLike[str] | PreTrainedModel,
    out: str | os.PathLike[str] | None = None,
    *,
    recipe: str | os.PathLike[str] | dict[str, Any] | Recipe | None = None,
    calibration: str | None = None,
    statistics: str | os.PathLike[str] | Statistics | None = None,
    plan: str | os.PathLike[str] | Plan | None = None,
    tokenizer: Any = None,
    overwrite: bool = False,
    device: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    max_shard_size: int | str = "5GB",
    resume: bool = False,
    memory: int | str | None = None,
    **options: Any,
) -> Compressed:
    """Compress a model and, with `out`, write it.

    `model` is a folder, a Hub name, or a model in memory, which is then changed in place. `options` are recipe
    entries (`keep=8`, `method="m-smoe"`, `format="vanilla"`; dotted ones as `**{"plan.similarity": "router-weight"}`)
    and go over those of `recipe`. Saved `statistics` or an edited `plan` take the place of the stage that makes them.

    A folder or Hub model that is written to `out` is never in memory as a whole, unless gradients are needed: its
    layers are read, worked on and written one after the other. If that is interrupted, the same call with `resume` goes
    on where it was. `memory` ("8GB") is what it may take; what cannot do with that is refused before any work. Several
    processes that torchrun has started share the work; the first of them writes the output.
    """
    made, team = prepare_recipe(recipe, calibration, options), current()
    saved_plan = plan if isinstance(plan, Plan) or plan is None else Plan.load(plan)
    saved_statistics = (
        statistics if isinstance(statistics, Statistics) or statistics is None else Statistics.load(statistics)
    )
    if not made.calibration.source and (needs_text(made) or not (saved_plan or saved_statistics or made.keeps_all)):
        raise MoepressError(
            "calibration text is missing: --calibration (calibration=) takes a file, a Hub dataset or a task"
        )
    whole = isinstance(model, PreTrainedModel) or needs_whole(made, planner_of(made).needs)
    check_shared(made, whole or out is None, team)
    if out is None:
        loaded, tokenizer, _ = open_source(model, tokenizer, device, trust_remote_code, revision)
        return _run(loaded, tokenizer, made, saved_statistics, saved_plan, written=False)
    name = model.config._name_or_path if isinstance(model, PreTrainedModel) else os.fspath(model)
    vanilla = made.format == "vanilla"
    records = records_beside(out) if vanilla else Path(out, RECORDS)
    given = {"--plan": plan, "--statistics": statistics, "--device": device, "--revision": revision}
    more = {
        option: str(value if isinstance(value, (str, os.PathLike)) else records / PLACE[option])
        for option, value in given.items()
        if value is not None
    }
    described = (
        Path(name).name or "MODEL",
        hub_name(name),
        compress_command(made, name or "MODEL", os.fspath(out), more),
    )
    # Folders are made before anything is loaded, so that an output that cannot be written is refused at once.
    if isinstance(model, PreTrainedModel) or whole:
        check_whole(isinstance(model, PreTrainedModel), memory is not None, resume)
        place = None if isinstance(model, PreTrainedModel) else model
        if place is not None:
            refuse_quantised(place, trust_remote_code, revision)
        with output_folder(out, overwrite=overwrite, source=place) as folder:
            loaded, tokenizer, source = open_source(model, tokenizer, device, trust_remote_code, revision)
            result = _run(loaded, tokenizer, made, saved_statistics, saved_plan)
            with result.outcome.timed("write"), quiet():
                save = save_vanilla if vanilla else save_compact
                save(loaded, result.outcome.specs, folder, source=source, max_shard_size=max_shard_size)
            result.folder, (result.name, result.base_model, result.command) = Path(out), described
            inside = records if vanilla else folder / RECORDS
            write_records(result.outcome, result.report(), folder, inside, title=Path(out).name, source=source)
    else:
        writing = job_folder(out, overwrite=overwrite, source=model, resume=resume) if team.leads else nullcontext()
        with writing as own:
            home, at = local_folder(model, revision), team.device(device)
            loaded, tokenizer, _ = open_source(home, tokenizer, at, trust_remote_code, None, paged=True)
            job = job_of(team, own, loaded, vanilla, shard_bytes(max_shard_size))
            job.same("job", what_decides(made.to_yaml(), loaded, saved_statistics, saved_plan, max_shard_size))
            result = _run(loaded, tokenizer, made, saved_statistics, saved_plan, job, bytes_from(memory))
            if not team.leads:
                result.folder = Path(out)
                return result
            with result.outcome.timed("write"), quiet():
                ready, entries = job.assemble(result.outcome.specs)
                copy_companions(home, ready)
                keep_wording(home, ready, type(loaded.config))
            result.outcome.notes += job.notes
            result.folder, (result.name, result.base_model, result.command) = Path(out), described
            inside = records if vanilla else ready / RECORDS
            write_records(result.outcome, result.report(), ready, inside, entries, title=Path(out).name, source=home)
    try:
        result.page = draw_report(records)
    except Exception as error:  # a picture is no reason to lose hours of work; what was lost is said
        note = f"the report could not be drawn ({type(error).__name__}: {error}); all else is complete"
        result.outcome.notes.append(note)
    return result


def prepare_recipe(
    recipe: str | os.PathLike[str] | dict[str, Any] | Recipe | None, calibration: str | None, options: dict[str, Any]
) -> Recipe:
    if isinstance(recipe, Recipe):
        given = recipe.model_dump(exclude_unset=True)
    elif isinstance(recipe, dict) or recipe is None:
        given = dict(recipe or {})
    else:
        given = load_recipe(recipe)
    return make_recipe(given, options | ({"calibration.source": calibration} if calibration else {}))


def open_source(
    model: str | os.PathLike[str] | PreTrainedModel,
    tokenizer: Any,
    device: str | None,
    trust_remote_code: bool,
    revision: str | None,
    paged: bool = False,
) -> tuple[PreTrainedModel, Any, str | os.PathLike[str] | None]:
    """The model, its tokenizer, and the folder or name that tokenizer files are copied from."""
    if isinstance(model, PreTrainedModel):
        return model, tokenizer, None
    loaded = load_model(model, device=device, trust_remote_code=trust_remote_code, revision=revision, paged=paged)
    if tokenizer is None:
        try:
            tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code, revision=revision)
        except MoepressError:
            tokenizer = None  # ready-made windows need none; whoever reads text says that it is missing
    return loaded, tokenizer, model


def _run(
    model: PreTrainedModel,
    tokenizer: Any,
    recipe: Recipe,
    statistics: Statistics | None,
    plan: Plan | None,
    job: Job | None = None,
    memory: int | None = None,
    written: bool = True,
) -> Compressed:
    if compact_specs(model):
        raise MoepressError(COMPACT_ALREADY)
    if written and plan is None:
        check_smaller(recipe, model, find_layers(model))
    before, team = sizes_of(model), current()

    def batches():  # type: ignore[no-untyped-def]
        shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
        made = calibration_batches(recipe.calibration, tokenizer, model.config, shift=shift)
        if job is not None:
            job.same("text", {"calibration text": fingerprint_of(made)})
        return made

    kept, what = recipe, ""
    if job is not None and memory is not None:
        layers = find_layers(model)
        check_fit(recipe, layers)
        text = team.own(batches()) if statistics is None or recipe.sequential or plan is None else None
        kept, spill = within(memory, recipe, need(recipe, layers, job.weights, text), layers)
        give_back_at_once()
        if spill:
            job.weights.shelf = Spill(job.folder / "spill")
            what = "calibration activations waited on disk, so that the memory was kept within what was given"
    outcome = press(model, kept, batches, statistics=statistics, plan=plan, journal=job, team=team)
    outcome.recipe = recipe
    outcome.notes += [what] if what else []
    return Compressed(outcome, before, sizes_of(model))


def export(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    duplicate: bool = False,
    multiple_of: int = 1,
    overwrite: bool = False,
    max_shard_size: int | str = "5GB",
) -> Sizes:
    """Write a compact checkpoint as a vanilla one, for any engine that loads the original.

    A layer that redirects has more router rows than experts, which no vanilla checkpoint can say: `duplicate` writes
    each original expert in full again (exact, and as large as the original). Decomposed matrices are multiplied out,
    to the size of whole ones.
    """
    with output_folder(out, overwrite=overwrite, source=model) as folder, quiet():
        loaded = load_model(model)
        specs = compact_specs(loaded)
        if not specs:
            raise MoepressError(f"{model} is not a compact checkpoint: there is nothing to export")
        save_vanilla(
            loaded,
            specs,
            folder,
            source=model,
            duplicate=duplicate,
            multiple_of=multiple_of,
            max_shard_size=max_shard_size,
        )
        sizes = sizes_of(load_skeleton(folder))  # of what was written, which may hold more than the compact model
        place = records_beside(out)
        write_export(folder, place, sizes.to_dict(), duplicate, title=Path(out).name, source=model)
    return sizes


def evaluate(
    model: str | os.PathLike[str] | PreTrainedModel,
    *,
    against: str | os.PathLike[str] | PreTrainedModel | None = None,
    text: str | None = None,
    task: str | None = None,
    samples: int | str = "all",
    length: int = 512,
    batch_size: int = 8,
    tokenizer: Any = None,
    device: str | None = None,
    split: str = "validation",
    scoring: str | None = None,
) -> dict[str, Any]:
    """Perplexity on text, or the metrics of a task; with `against`, also KL to that original and how often both agree.

    `scoring` says how a task's answers are found, see `moepress.evaluation.task_metrics`.
    """
    from moepress.data.batches import CalibrationData
    from moepress.data.examples import task_examples
    from moepress.evaluation import compare, perplexity, task_metrics

    if (text is None) == (task is None):
        raise MoepressError("evaluate on either text or a task")
    if scoring is not None and task is None:
        raise MoepressError("scoring is about tasks: text has none")
    loaded, tokenizer, _ = open_source(model, tokenizer, device, False, None)
    original = None if against is None else open_source(against, None, device, False, None)[0]
    if task is not None:
        name, _, folder = task.partition("@")
        chosen, examples = task_examples(name, split, folder or None, None if samples == "all" else int(samples))
        if tokenizer is None:
            raise MoepressError(f"task {name!r} is text, and the model has no tokenizer to read it")
        return task_metrics(
            loaded,
            chosen,
            examples,
            original,
            tokenizer=tokenizer,
            batch_size=batch_size,
            length=length,
            scoring=scoring,  # type: ignore[arg-type]
        ).to_dict()
    options = CalibrationData(source=str(text), samples=samples, length=length, batch_size=batch_size)  # type: ignore[arg-type]
    shift = getattr(loaded, "prepare_decoder_input_ids_from_labels", None)
    batches = calibration_batches(options, tokenizer, loaded.config, split=split, shift=shift)
    if original is None:
        return perplexity(loaded, batches).to_dict()
    return compare(loaded, original, batches).to_dict()
