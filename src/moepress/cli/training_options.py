"""Options that the commands which train have in common."""

from __future__ import annotations

from typing import Annotated

import typer

Train = Annotated[str | None, typer.Option(help="all, all-but-router, moe, experts or router. [default: all]")]
Accumulate = Annotated[int | None, typer.Option(help="Parts of a step, to need less memory. [default: 1]")]
Patience = Annotated[int | None, typer.Option(help="Looks without improvement before the end. [default: 8]")]
Checkpointing = Annotated[bool, typer.Option(help="Compute activations twice instead of keeping them.")]
MixedPrecision = Annotated[str | None, typer.Option(help="no, bf16 or fp16. [default: accelerate's]")]
Seed = Annotated[int | None, typer.Option(help="Of everything random. [default: 0]")]
SaveEvery = Annotated[int | None, typer.Option(help="Steps between saved states. [default: 50]")]
Resume = Annotated[bool, typer.Option(help="Go on with a run that was killed.")]
Overwrite = Annotated[bool, typer.Option(help="Replace an output folder that exists.")]
Device = Annotated[str | None, typer.Option(help="cpu, or what accelerate finds.")]
Length = Annotated[int, typer.Option(help="Tokens of a sample.")]
