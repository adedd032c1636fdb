"""The paper's tables, made again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from moepress.cli.compress import given_options, parse_int, parse_keep
from moepress.cli.output import Json, print_json, print_results, print_table, quiet_if
from moepress.paper.tables import TABLES, Quality, Several
from moepress.paper.tables.pictures import PICTURES
from moepress.paper.tables.running import RUNNING

app = typer.Typer(help="The paper's tables and figures, and ours beside them.", rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def options(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo("Tables of the paper: moepress paper NAME; --help after a name says what it takes.\n")
        for command in context.command.list_commands(context):  # type: ignore[attr-defined]
            typer.echo(f"{command:18} {context.command.get_command(context, command).help}")  # type: ignore[attr-defined]


@app.command()
def sizes(
    model: Annotated[list[str] | None, typer.Option(help="Only these models (repeat); default all.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights, for their bytes.")] = "bfloat16",
    as_json: Json = False,
) -> None:
    """Parameters, bytes and FLOPs of the paper's models before and after. Needs no weights."""
    from moepress.checkpoint.sizes import human_size
    from moepress.paper.sizes import NOTE, paper_sizes

    rows = paper_sizes(model, dtype=dtype)
    if as_json:
        print_json([row.to_dict() for row in rows])
        return
    columns = ["method", "stored", "paper: not zero", "S whole", "bytes", "TFLOPs", "paper: TFLOPs", "at tokens"]
    names = list(dict.fromkeys(row.model for row in rows))
    for name in names:
        cells = [
            [
                row.method,
                f"{row.parameters / 1e6:,.1f} M",
                row.paper_parameters,
                f"{row.whole_parameters / 1e6:,.1f} M",
                human_size(row.bytes),
                f"{row.tflops:.2f}",
                f"{row.paper_tflops:.2f}",
                f"{row.paper_tokens:.0f}" if row.paper_tokens is not None else "",
            ]
            for row in rows
            if row.model == name
        ]
        print_table(name, columns, cells, NOTE if name == names[-1] else "")


Model = Annotated[str, typer.Option(help="A folder or a Hub name; the original, with all its experts.")]
Text = Annotated[str | None, typer.Option(help="Held-out text to judge by; with --calibration.")]
Calibration = Annotated[str | None, typer.Option(help="Text to calibrate on, as for compress.")]
Tasks = Annotated[list[str] | None, typer.Option(help="A labelled task, such as sst2@FOLDER (repeat).")]
Keep = Annotated[str | None, typer.Option(help="Experts per layer: a count or a fraction. [default: the paper's]")]
Samples = Annotated[str, typer.Option(help="Calibration samples, or `all`.")]
Limit = Annotated[str, typer.Option(help="Held-out samples, or records of a task, or `all`.")]
Length = Annotated[int, typer.Option(help="Tokens of a sample.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Samples of a forward pass.")]
Changes = Annotated[list[str] | None, typer.Option("--set", help="A recipe entry over those of every row.")]
Rank = Annotated[int | None, typer.Option(help="Of decomposed experts. [default: the width / 24]")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, …")]


def quality_command(table: Quality | Several) -> Callable[..., None]:
    def command(
        model: Model,
        text: Text = None,
        calibration: Calibration = None,
        task: Tasks = None,
        out: Annotated[Path, typer.Option("-o", "--out", help="Folder of the results.")] = Path("out/paper"),
        keep: Keep = None,
        seeds: Annotated[int, typer.Option(min=1, help="Runs of each row, on other calibration samples.")] = 3,
        samples: Samples = "256",
        limit: Limit = "all",
        length: Length = 512,
        batch_size: BatchSize = 8,
        scoring: Annotated[str | None, typer.Option(help="Of tasks, as for evaluate.")] = None,
        set: Changes = None,
        steps: Annotated[int, typer.Option(min=0, help="Of recovery after compression; 0: none.")] = 0,
        lr: Annotated[float | None, typer.Option(help="Learning rate of recovery. [default: 3e-4]")] = None,
        train_batch_size: Annotated[int, typer.Option(min=1, help="Samples of a step.")] = 16,
        train_samples: Annotated[str, typer.Option(help="To learn from, or `all`.")] = "all",
        finetune: Annotated[
            float | None, typer.Option(help="Epochs in which the model learns each task first.")
        ] = None,
        dense: Annotated[str | None, typer.Option(help="A dense model for the row of that name.")] = None,
        rank: Rank = None,
        device: Device = None,
        as_json: Json = False,
    ) -> None:
        from moepress.paper.asked import Asked
        from moepress.paper.quality import make_table
        from moepress.paper.words import tables_of

        asked = Asked(
            table.name,
            model,
            text,
            calibration,
            tuple(task or ()),
            keep=parse_keep(keep),
            seeds=seeds,
            samples=count("--samples", samples),
            limit=count("--limit", limit),
            length=length,
            batch_size=batch_size,
            scoring=scoring,
            steps=steps,
            lr=lr,
            train_batch_size=train_batch_size,
            train_samples=count("--train-samples", train_samples),
            finetune=finetune,
            dense=dense,
            rank=rank,
            changes=given_options({}, set or []),
            device=device,
        )
        with quiet_if(as_json):
            data = make_table(asked, out)
        print_results(data, tables_of(data), f"Written to {out / table.name}.json, .md and .png", as_json)

    return command


def figure_command(name: str) -> Callable[..., None]:
    def command(
        model: Model,
        calibration: Calibration = None,
        task: Tasks = None,
        out: Annotated[Path, typer.Option("-o", "--out", help="Folder of the pictures.")] = Path("out/paper"),
        keep: Keep = None,
        samples: Samples = "256",
        length: Length = 512,
        batch_size: BatchSize = 8,
        set: Changes = None,
        rank: Rank = None,
        device: Device = None,
        as_json: Json = False,
    ) -> None:
        from moepress.paper.asked import Asked
        from moepress.paper.figures import make_figure

        asked = Asked(
            name,
            model,
            None,
            calibration,
            tuple(task or ()),
            keep=parse_keep(keep),
            samples=count("--samples", samples),
            length=length,
            batch_size=batch_size,
            changes=given_options({}, set or []),
            rank=rank,
            device=device,
            judged=False,
        )
        with quiet_if(as_json):
            data = make_figure(asked, out)
        if as_json:
            print_json(data)
        else:
            for column in data["columns"]:
                typer.echo(f"{out / name}-{column}.png")

    return command


def count(option: str, text: str) -> Any:
    return text if text == "all" else parse_int(option, text)


for made in TABLES.values():
    app.command(made.name, help=f"{made.title}. {made.needs}")(quality_command(made))
for name, picture in PICTURES.items():
    app.command(name, help=f"{picture.title}. {picture.needs}")(figure_command(name))


@app.command()
def teaser(
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder of the main table.")] = Path("out/paper"),
    column: Annotated[str | None, typer.Option(help="Of the table. [default: its first]")] = None,
) -> None:
    """Quality against size. Figure. Needs the main table."""
    from moepress.paper.figures import make_teaser

    typer.echo(str(make_teaser(out, column)))


@app.command("model-card")
def model_card(as_json: Json = False) -> None:
    """The paper's models: parameters, layers, width, experts. Needs no weights."""
    from moepress.paper.facts import card_table
    from moepress.paper.facts import model_card as made

    rows = made()
    print_results(rows, [card_table(rows)], "", as_json)


@app.command("hyper-parameters")
def hyper_parameters(as_json: Json = False) -> None:
    """Settings of training and compression. Needs nothing."""
    from moepress.paper.facts import hyper_parameters as made
    from moepress.paper.facts import hyper_table

    rows = made()
    print_results(rows, [hyper_table(rows)], "", as_json)


def running_command(name: str) -> Callable[..., None]:
    def command(
        model: Model,
        calibration: Calibration = None,
        task: Tasks = None,
        out: Annotated[Path, typer.Option("-o", "--out", help="Folder of the results.")] = Path("out/paper"),
        batch_sizes: Annotated[str, typer.Option(help="Samples of a pass, with commas.")] = RUNNING[name].batch_sizes,
        source: Annotated[int, typer.Option(min=1, help="Tokens that are read.")] = 329,
        target: Annotated[int, typer.Option(min=1, help="Tokens that an encoder–decoder model writes.")] = 13,
        repeats: Annotated[int, typer.Option(min=1, help="Timed passes of each model.")] = 5,
        dense: Annotated[str | None, typer.Option(help="A dense model for a row of its own.")] = None,
        keep: Keep = None,
        samples: Samples = "256",
        length: Length = 512,
        rank: Rank = None,
        device: Device = None,
        as_json: Json = False,
    ) -> None:
        from moepress.paper.asked import Asked
        from moepress.paper.costs import Running, measure_running, tables_of

        asked = Asked(name, model, None, calibration, tuple(task or ()), keep=parse_keep(keep), length=length,
                      samples=count("--samples", samples), dense=dense, rank=rank, device=device,
                      judged=False)  # fmt: skip
        given = Running(asked, numbers("--batch-sizes", batch_sizes), source, target, repeats)
        with quiet_if(as_json):
            data = measure_running(given, out)
        print_results(data, tables_of(data), f"Written to {out / name}.json, .md and .png", as_json)

    return command


for name, running in RUNNING.items():
    app.command(name, help=f"{running.title}. {running.needs}")(running_command(name))


@app.command("merging-cost")
def merging_cost(
    model: Model,
    calibration: Calibration = None,
    task: Tasks = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder of the results.")] = Path("out/paper"),
    layers: Annotated[str, typer.Option(help="How many are merged, with commas. [default: 2,4,… all]")] = "",
    keep: Keep = None,
    samples: Samples = "256",
    length: Length = 512,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Time and memory of alignment, grouping and averaging, by layers. Needs a model, and text or tasks to calibrate
    on."""
    from moepress.paper.asked import Asked
    from moepress.paper.merging_cost import measure_merging, tables_of

    asked = Asked("merging-cost", model, None, calibration, tuple(task or ()), keep=parse_keep(keep), length=length,
                  samples=count("--samples", samples), device=device, judged=False)  # fmt: skip
    with quiet_if(as_json):
        data = measure_merging(asked, numbers("--layers", layers) if layers else (), out)
    print_results(data, tables_of(data), f"Written to {out / 'merging-cost'}.json, .md and .png", as_json)


def numbers(option: str, text: str) -> tuple[int, ...]:
    return tuple(parse_int(option, part) for part in text.split(","))
