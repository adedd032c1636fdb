from __future__ import annotations

from typing import Annotated, Any

import typer

from moepress.cli.compress import parse_int
from moepress.cli.output import Json, print_json, print_table, quiet_if


def evaluate(
    model: Annotated[str, typer.Argument(help="A folder or a Hub name.")],
    against: Annotated[str | None, typer.Option(help="The original, for KL and agreement.")] = None,
    text: Annotated[str | None, typer.Option(help="Text as for --calibration of compress.")] = None,
    task: Annotated[str | None, typer.Option(help="A labelled task by name, such as sst2 or sst2@FOLDER.")] = None,
    samples: Annotated[str, typer.Option(help="How many, or `all`.")] = "all",
    length: Annotated[int, typer.Option(help="Tokens of a sample.")] = 512,
    batch_size: Annotated[int, typer.Option(help="Samples of a forward pass.")] = 8,
    split: Annotated[str, typer.Option(help="Of records and tasks that have splits.")] = "validation",
    scoring: Annotated[
        str | None,
        typer.Option(
            help="How a task's answers are found: sum or mean of a choice's log-probabilities, paper (whole text), or "
            "teacher-forced (the authors' numbers). [default: sum, or what the model writes]"
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, …")] = None,
    record: Annotated[bool, typer.Option(help="Add the result to the report of an output of compress.")] = True,
    as_json: Json = False,
) -> None:
    """Perplexity, KL to the original and agreement on text. The metrics of a task."""
    from moepress import api
    from moepress.records import check_original, record_evaluation
    from moepress.report import has_records

    with quiet_if(as_json):
        record = record and has_records(model)
        if record and against is not None:
            check_original(model, against)
        score = api.evaluate(
            model,
            against=against,
            text=text,
            task=task,
            samples="all" if samples == "all" else parse_int("--samples", samples),
            length=length,
            batch_size=batch_size,
            split=split,
            scoring=scoring,
            device=device,
        )
        page = None
        if record:
            asked = {"against": against, "text": text, "task": task, "length": length, "split": split}
            asked["scoring"] = scoring
            if samples != "all":
                asked["samples"] = samples
            page = record_evaluation(model, score, **{k: v for k, v in asked.items() if v is not None})
    if as_json:
        print_json({"model": model, "against": against} | score)
        return
    domains: dict[str, Any] = score.get("domains", {})
    columns = [name for name in score if name != "domains"]
    rows = [["all", *(_number(score[c]) for c in columns)]]
    rows += [[name, *(_number(own.get(c, "")) for c in columns)] for name, own in domains.items()]
    print_table(f"{model}" + (f" against {against}" if against else ""), ["", *columns], rows)
    if page:
        typer.echo(f"Added to {page}")


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
