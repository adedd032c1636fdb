from __future__ import annotations

from collections.abc import Callable
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
from moepress.errors import MoepressError


def finetune(
    model: Annotated[str, typer.Argument(help="A pretrained model: a folder or a Hub name.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Where the fine-tuned model goes.")],
    task: Annotated[str, typer.Option(help="A labelled task by name, such as sst2 or sst2@FOLDER.")],
    lr: Annotated[
        str | None, typer.Option(help="Learning rate; several, with commas, are all tried. [default: the paper's]")
    ] = None,
    batch_size: Annotated[
        str | None, typer.Option(help="Samples of a step; several, as for --lr. [default: the paper's]")
    ] = None,
    epochs: Annotated[
        str | None, typer.Option(help="Rounds through the examples; several, as for --lr. [default: 3]")
    ] = None,
    search: Annotated[bool, typer.Option(help="Try the paper's grid of everything that is not given.")] = False,
    train: Train = None,
    samples: Annotated[str, typer.Option(help="How many examples, or `all`.")] = "all",
    length: Length = 512,
    accumulate: Accumulate = None,
    evaluate_every: Annotated[int | None, typer.Option(help="Steps between looks at validation. [default: 25]")] = None,
    patience: Patience = None,
    checkpointing: Checkpointing = False,
    mixed_precision: MixedPrecision = None,
    seed: Seed = None,
    save_every: SaveEvery = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Fine-tune a pretrained model on a labelled task. A compressed one can learn from it."""
    from moepress.finetuning import finetune as run

    options = given_options(
        {
            "train": train,
            "accumulate": accumulate,
            "evaluate_every": evaluate_every,
            "patience": patience,
            "checkpointing": checkpointing or None,
            "mixed_precision": mixed_precision,
            "seed": seed,
            "save_every": save_every,
        },
        [],
    )
    with quiet_if(as_json):
        result = run(
            model,
            out,
            task=task,
            lr=listed("--lr", lr, float),
            batch_size=listed("--batch-size", batch_size, int),
            epochs=listed("--epochs", epochs, float),
            search=search,
            samples=samples if samples == "all" else parse_int("--samples", samples),
            length=length,
            resume=resume,
            overwrite=overwrite,
            device=device,
            **options,
        )
    if as_json:
        print_json(result.made | {"folder": str(out)})
        return
    names = [name for name in result.search[0]["score"] if name not in ("task", "examples")]
    rows = [
        [f"{row['lr']:g}", str(row["batch_size"]), f"{row['epochs']:g}", *(f"{row['score'][n]:.4f}" for n in names)]
        for row in result.search
    ]
    print_table(f"{model} → {out}", ["lr", "batch", "epochs", *names], rows, f"validation of {task}; the best is kept")


def listed(option: str, text: str | None, kind: Callable[[str], Any]) -> list[Any] | None:
    if text is None:
        return None
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise MoepressError(f"{option} wants numbers with commas between them, not {text!r}") from None
