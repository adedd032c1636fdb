"""What `bench align` found, as tables and as a picture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from moepress.bench.results import Table
from moepress.bench.timing import Timing, human_seconds


def tables_of(data: dict[str, Any]) -> list[Table]:
    tables = [solver_table(data), stage_table(data), layer_table(data)]
    return [*tables, model_table(data)] if data["model"] else tables


def median(family: dict[str, Any], stage: str) -> float:
    return float(family["per_problem"][stage]["median"])


def spread(family: dict[str, Any], stage: str) -> str:
    return Timing(family["per_problem"][stage]["seconds"]).words()


def solved_words(solved: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(solved.items()))


def solver_table(data: dict[str, Any]) -> Table:
    rows = [
        [
            family["words"],
            spread(family, "SciPy"),
            spread(family, "solve"),
            f"{median(family, 'SciPy') / median(family, 'solve'):.1f}×",
            f"{family['worst_gap']:.1e}",
            f"{family['worst_against_scipy']:.1e}",
            solved_words(family["solved"]),
            f"{family['bids_per_unit']:.1f}",
        ]
        for family in data["layer"].values()
    ]
    settings = data["settings"]
    note = (
        f"One assignment: median of {settings['repeats']} rounds (fastest – slowest), {data['clock']}. A round is "
        f"{settings['reference']} problems for SciPy and {settings['count']} for ours, solved in one call with their "
        "certificates. Certified gap: how far a total can be from the best one, proven. Worse than SciPy: how far it "
        "was (0: the same total)."
    )
    columns = ["experts", "SciPy", "ours", "faster", "certified gap", "worse than SciPy", "solved by", "bids a unit"]
    return Table(f"Assignment, n = {settings['hidden']}", columns, rows, note)


def stage_table(data: dict[str, Any]) -> Table:
    stages = ["paper's cost", "cost", "cost from bfloat16", "prove", "bid", "certify"]
    rows = []
    for family in data["layer"].values():
        # Nothing is left to bid for where row maxima are a proof.
        done = stages[:4] if set(family["solved"]) == {"proof"} else stages
        cells = [human_seconds(median(family, stage)) if stage in done else "–" for stage in stages]
        rows.append([family["words"], *cells])
    return Table("Stages, for one problem", ["experts", *stages], rows)


def layer_table(data: dict[str, Any]) -> Table:
    count = data["settings"]["count"]
    rows = []
    for family in data["layer"].values():
        paper = count * (median(family, "paper's cost") + median(family, "SciPy"))
        exact = count * (median(family, "cost") + median(family, "solve"))
        rounded = count * (median(family, "cost from bfloat16") + median(family, "solve"))
        rows.append(
            [
                family["words"],
                human_seconds(paper),
                human_seconds(exact),
                f"{paper / exact:.1f}×",
                human_seconds(rounded),
                f"{paper / rounded:.1f}×",
                f"{family['worst_loss_from_bfloat16']:.1e}",
            ]
        )
    columns = ["experts", "paper's loop", "ours", "faster", "ours from bfloat16", "faster", "its loss of the total"]
    note = "The paper's loop: two float32 matrix products and SciPy for each expert. From the medians above."
    return Table(f"A whole layer: {count} costs and assignments", columns, rows, note)


def model_table(data: dict[str, Any]) -> Table:
    rows = []
    for name, model in data["model"].items():
        family, problems = data["layer"][name], model["problems"]
        paper = problems * (median(family, "paper's cost") + median(family, "SciPy"))
        ours = model["cost"] + model["solve"]["median"]
        rows.append(
            [
                model["words"],
                str(problems),
                human_seconds(paper),
                human_seconds(model["cost"]),
                Timing(model["solve"]["seconds"]).words(),
                f"{paper / ours:.0f}×",
                f"{model['worst_gap']:.1e}",
                str(model["calls"]),
            ]
        )
    columns = ["experts", "problems", "paper's loop", "our costs", "our solver", "faster", "certified gap", "calls"]
    return Table("A whole model", columns, rows, "The paper's loop is extrapolated from the problems of one layer.")


def drawing(data: dict[str, Any]) -> Callable[[Path], None]:
    def draw(file: Path) -> None:
        from matplotlib.figure import Figure

        families = list(data["layer"].values())
        figure = Figure(figsize=(8, 1.2 + 0.8 * len(families)), layout="constrained")
        axes = figure.subplots()
        for place, family in enumerate(families):
            scipy, ours = median(family, "SciPy"), median(family, "solve")
            axes.barh(place - 0.2, scipy, 0.38, color="#9aa5b1", label="SciPy" if place == 0 else None)
            axes.barh(place + 0.2, ours, 0.38, color="#1f6f8b", label="moepress" if place == 0 else None)
            axes.text(ours * 1.1, place + 0.2, f"{human_seconds(ours)}: {scipy / ours:.2g}×", va="center")
            axes.text(scipy * 1.1, place - 0.2, human_seconds(scipy), va="center")
        axes.set_yticks(range(len(families)), [family["words"] for family in families])
        axes.invert_yaxis()
        axes.set_xscale("log")
        shortest = min(min(median(family, "SciPy"), median(family, "solve")) for family in families)
        axes.set_xlim(left=shortest / 3, right=axes.get_xlim()[1] * 4)
        axes.set_xlabel(f"one assignment of {data['settings']['hidden']} hidden units, {data['clock']}")
        axes.legend(loc="lower right")
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(file, dpi=150)

    return draw
