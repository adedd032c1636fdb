from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from moepress.cli.output import Json, print_json, print_table, quiet_if
from moepress.errors import MoepressError

if TYPE_CHECKING:
    from moepress.pipeline import Outcome


def compress(
    model: Annotated[str, typer.Argument(help="A folder or a Hub name.")],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Where the smaller model goes.")] = None,
    method: Annotated[str | None, typer.Option(help="See `moepress methods`. [default: auto]")] = None,
    preset: Annotated[str | None, typer.Option(help="A named variation of the method, such as paper.")] = None,
    keep: Annotated[str | None, typer.Option(help="Experts per layer: a count (8) or a fraction (0.5).")] = None,
    target_size: Annotated[
        str | None, typer.Option(help="Instead of --keep: size of the output, such as 12GB.")
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(
            help="Text of the kind that the model will serve: FILE.jsonl, FILE.txt, hub:NAME:SPLIT, task:NAME, "
            "or a mixture a.jsonl:0.3,b.jsonl:0.7."
        ),
    ] = None,
    samples: Annotated[str | None, typer.Option(help="Calibration samples, or `all`. [default: 256]")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of a sample. [default: 512]")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples of a forward pass. [default: 8]")] = None,
    chat_template: Annotated[
        bool | None, typer.Option("--chat-template/--no-chat-template", help="Render messages with the chat template.")
    ] = None,
    format: Annotated[
        str | None, typer.Option(help="compact (smallest) or vanilla (loads everywhere). [default: compact]")
    ] = None,
    router: Annotated[str | None, typer.Option(help="redirect, keep or mean.")] = None,
    multiple_of: Annotated[int | None, typer.Option(help="Experts per layer in multiples of this.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of everything random. [default: 0]")] = None,
    recipe: Annotated[Path | None, typer.Option(help="A YAML recipe; options here go over it.")] = None,
    set: Annotated[
        list[str] | None, typer.Option("--set", help="Any recipe entry that the method uses: --set plan.skip=auto.")
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="Use this (edited) plan.json instead of making one.")] = None,
    statistics: Annotated[Path | None, typer.Option(help="Use these saved statistics instead of calibrating.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, … [default: cpu]")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub model.")] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Run code that comes with the model.")] = False,
    max_shard_size: Annotated[str, typer.Option(help="Of the output's files.")] = "5GB",
    overwrite: Annotated[bool, typer.Option(help="Replace an output folder that exists.")] = False,
    memory: Annotated[
        str | None, typer.Option(help="What it may take, such as 8GB; refused at once if that is not enough.")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on with the same command where it was interrupted.")] = False,
    push: Annotated[str | None, typer.Option(help="Then upload it to the Hub, as USER/MODEL.")] = None,
    private: Annotated[bool, typer.Option("--private", help="With --push: for you alone.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Only say what would come out: sizes, time, memory.")] = False,
    as_json: Json = False,
) -> None:
    """Make a model smaller."""
    from moepress import api
    from moepress.checkpoint.folder import refuse_output
    from moepress.estimate import estimate
    from moepress.publishing import check_access
    from moepress.publishing import push as upload
    from moepress.watch import leads

    options = given_options(
        {
            "method": method,
            "preset": preset,
            "keep": parse_keep(keep),
            "target_size": target_size,
            "calibration.samples": samples if samples in (None, "all") else parse_int("--samples", str(samples)),
            "calibration.length": length,
            "calibration.batch_size": batch_size,
            "calibration.chat_template": chat_template,
            "format": format,
            "router": router,
            "multiple_of": multiple_of,
            "seed": seed,
        },
        set or [],
    )
    if private and push is None:
        raise MoepressError("--private is about --push: say where it is to be uploaded")
    with quiet_if(as_json):
        if dry_run and not leads():
            return
        if dry_run:
            made = api.prepare_recipe(recipe, calibration, options)
            if out is not None:
                refuse_output(out, overwrite, model)
            predicted = estimate(model, made, memory, trust_remote_code=trust_remote_code, revision=revision)
            if as_json:
                print_json(predicted.to_dict())
            else:
                print_table(f"{model}, dry run", ["", "before", "after"], predicted.rows(), predicted.note())
            return
        if out is None:
            raise MoepressError("say where the output goes: -o FOLDER")
        if push is not None:
            check_access(push)
        result = api.compress(
            model,
            out,
            recipe=recipe,
            calibration=calibration,
            statistics=statistics,
            plan=plan,
            overwrite=overwrite,
            device=device,
            trust_remote_code=trust_remote_code,
            revision=revision,
            max_shard_size=max_shard_size,
            resume=resume,
            memory=memory,
            **options,
        )
    if not leads():
        return
    report = result.report() | {"folder": str(out)}
    if as_json:
        if push is not None:
            report["address"] = upload(out, push, private=private)
        print_json(report)
        return
    rows = [
        ["parameters", f"{result.before.parameters:,}", f"{result.after.parameters:,}"],
        ["of these in experts", f"{result.before.expert_parameters:,}", f"{result.after.expert_parameters:,}"],
        ["weights", result.before.human(), result.after.human()],
    ]
    took = ", ".join(f"{stage} {s:.1f} s" for stage, s in result.outcome.seconds.items() if s >= 0.05)
    print_table(f"{model} → {out}", ["", "before", "after"], rows, took)
    for note in result.outcome.notes:
        typer.echo(note)
    typer.echo(f"Report: {result.page}")
    if result.outcome.recipe.format == "compact":
        typer.echo(f"Load it: import moepress; AutoModel….from_pretrained({str(out)!r})")
        if is_even(result.outcome):
            typer.echo(f"Without moepress: moepress export {out} -o FOLDER, which is no larger")
    if push is not None:
        with quiet_if(False):
            typer.echo(upload(out, push, private=private))


def is_even(outcome: Outcome) -> bool:
    """Whether a compact output has the same number of experts in every layer, one router row each."""
    specs = outcome.specs.values()
    whole = any(layer.name not in outcome.specs for layer in outcome.plan.layers)
    return not whole and len({spec.physical for spec in specs}) == 1 and all(spec.router == "rows" for spec in specs)


def given_options(named: dict[str, Any], assignments: list[str]) -> dict[str, Any]:
    """Options that were given, and those of --set (as YAML values) over them."""
    options = {name: value for name, value in named.items() if value is not None}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not key:
            raise MoepressError(f"--set wants KEY=VALUE, such as plan.similarity=router-weight, not {assignment!r}")
        try:
            options[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise MoepressError(f"--set {key}: {value!r} is not a YAML value") from None
    return options


def parse_keep(text: str | None) -> int | float | None:
    """8 is a count; 0.5, or anything with a decimal point, a fraction."""
    if text is None:
        return None
    try:
        return float(text) if "." in text or "e" in text.lower() else int(text)
    except ValueError:
        raise MoepressError(f"--keep wants a count (8) or a fraction (0.5), not {text!r}") from None


def parse_int(option: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise MoepressError(f"{option} wants a number, not {text!r}") from None
