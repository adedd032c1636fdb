from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from moepress.cli.compress import given_options, parse_int
from moepress.cli.output import Json, print_json, print_table, quiet_if
from moepress.cli.training_options import (
    Accumulate,
    Checkpointing,
    Device,
    Length,
    MixedPrecision,
    Overwrite,
    Patience,
    Resume,
    SaveEvery,
    Seed,
    Train,
)


def recover(
    model: Annotated[str, typer.Argument(help="The compressed model: a folder, compact or vanilla.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Where the recovered model goes.")],
    teacher: Annotated[str | None, typer.Option(help="The model that it was made of.")] = None,
    task: Annotated[str | None, typer.Option(help="A labelled task by name, such as sst2 or sst2@FOLDER.")] = None,
    data: Annotated[str | None, typer.Option(help="Text, as for --calibration of compress.")] = None,
    objective: Annotated[
        str | None, typer.Option(help="task: labels and teacher; text: the teacher alone. [default: by what is given]")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Updates of the weights. [default: 200]")] = None,
    epochs: Annotated[float | None, typer.Option(help="Instead of --steps: rounds through the samples.")] = None,
    lr: Annotated[float | None, typer.Option(help="Highest learning rate. [default: 3e-4]")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples of a step, in all. [default: 16]")] = None,
    accumulate: Accumulate = None,
    train: Train = None,
    alpha: Annotated[float | None, typer.Option(help="Weight of the KL beside the labels. [default: 0.2]")] = None,
    temperature: Annotated[float | None, typer.Option(help="Of the KL. [default: 2 with labels, 1 without]")] = None,
    samples: Annotated[str, typer.Option(help="How many, or `all`.")] = "all",
    length: Length = 512,
    hold_out: Annotated[
        float | None, typer.Option(help="Share of the text to judge by; 0: take the last weights. [default: 0.1]")
    ] = None,
    evaluate_every: Annotated[int | None, typer.Option(help="Steps between looks at it. [default: 25]")] = None,
    patience: Patience = None,
    cache: Annotated[
        str | None, typer.Option(help="Keep the teacher's outputs on disk: none, full, or so many of the likeliest.")
    ] = None,
    checkpointing: Checkpointing = False,
    mixed_precision: MixedPrecision = None,
    tracker: Annotated[
        list[str] | None, typer.Option(help="tensorboard, wandb, …; more than one may be given.")
    ] = None,
    log_dir: Annotated[str | None, typer.Option(help="Folder of trackers that write files.")] = None,
    seed: Seed = None,
    save_every: SaveEvery = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Train a compressed model to answer like the one it was made of. `accelerate launch` takes this command, too."""
    from moepress.training import recover as run

    options = given_options(
        {
            "objective": objective,
            "steps": steps,
            "lr": lr,
            "batch_size": batch_size,
            "accumulate": accumulate,
            "train": train,
            "alpha": alpha,
            "temperature": temperature,
            "hold_out": hold_out,
            "evaluate_every": evaluate_every,
            "patience": patience,
            "cache": cache if cache in (None, "none", "full") else parse_int("--cache", str(cache)),
            "checkpointing": checkpointing or None,
            "mixed_precision": mixed_precision,
            "trackers": tuple(tracker) if tracker else None,
            "log_dir": log_dir,
            "seed": seed,
            "save_every": save_every,
        },
        [],
    )
    with quiet_if(as_json):
        result = run(
            model,
            out,
            teacher=teacher,
            data=data,
            task=task,
            samples=samples if samples == "all" else parse_int("--samples", samples),
            length=length,
            epochs=epochs,
            resume=resume,
            overwrite=overwrite,
            device=device,
            **options,
        )
    if as_json:
        print_json(result.made | {"folder": str(out)})
        return
    print_table(f"{model} → {out}", ["step", "held-out loss"], looks(result.report), words(result.report))


def looks(report: Any) -> list[list[str]]:
    return [[str(step) + (" ●" if step == report.best else ""), f"{loss:.4f}"] for step, loss in report.held_out]


def words(report: Any) -> str:
    said = f"{report.steps} steps"
    said += f", the weights of step {report.best} were kept" if report.best is not None else ""
    return said + (f"; stopped: {report.stopped}" if report.stopped else "")
