"""What a comparison found, as tables."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from moepress.bench.results import Table
from moepress.bench.timing import human_seconds
from moepress.checkpoint.sizes import human_size


@dataclass(frozen=True)
class Spread:
    """One figure over seeds."""

    values: list[float]

    @property
    def mean(self) -> float:
        return fmean(self.values)

    @property
    def deviation(self) -> float | None:
        return stdev(self.values) if len(self.values) > 1 else None

    def words(self, form: str = "{:.4f}") -> str:
        return form.format(self.mean) + (f" ± {form.format(self.deviation)}" if self.deviation is not None else "")


def by_size(data: dict[str, Any]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Rows by size and method, one for each seed."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in data["rows"].values():
        found.setdefault(row["size"], {}).setdefault(row["method"], []).append(row)
    return found


def over_seeds(rows: list[dict[str, Any]], name: str) -> Spread:
    return Spread([row[name] for row in rows])


def tables_of(data: dict[str, Any]) -> list[Table]:
    """All rows together, then KL and perplexity by domain."""
    domains = list(data["original"]["domains"])
    tables = [overview(data)]
    if domains:
        tables += [by_domain(data, name, title, domains) for name, title in
                   (("kl", "KL to the original"), ("perplexity", "Perplexity"))]  # fmt: skip
    return tables


def overview(data: dict[str, Any]) -> Table:
    columns = ["method", "size", "weights", "KL", "perplexity", "agreement", "same start", "time", "peak memory"]
    own = data["original"]
    rows = [["original", "", human_size(own["bytes"]), "0", f"{own['perplexity']:.2f}", "1", "1", "", ""]]
    for size, methods in by_size(data).items():
        for method, found in methods.items():
            peaks = [row["peak_memory"] for row in found if row["peak_memory"] is not None]
            rows.append(
                [
                    method,
                    size,
                    human_size(over_seeds(found, "bytes").mean),
                    over_seeds(found, "kl").words(),
                    over_seeds(found, "perplexity").words("{:.2f}"),
                    over_seeds(found, "agreement").words("{:.3f}"),
                    over_seeds(found, "continuation").words("{:.3f}"),
                    human_seconds(over_seeds(found, "seconds").mean),
                    human_size(max(peaks)) if peaks else "unknown",
                ]
            )
    settings = data["settings"]
    note = (
        f"KL(original || model) in nats per token, agreement of the first choices, both on held-out text. Same start: "
        f"the share of {settings['new']} greedily written tokens before the first that the original would not have "
        f"written, after {settings['prompt']} tokens of text. Mean"
        + (f" ± standard deviation over {settings['seeds']} seeds." if settings["seeds"] > 1 else " of one seed.")
        + " Peak memory is that of the process, both models included."
        + "".join(f" Not made, {size}: {why}." for size, why in data["out_of_reach"].items())
    )
    return Table("Methods", columns, rows, note)


def by_domain(data: dict[str, Any], name: str, title: str, domains: list[str]) -> Table:
    rows = []
    if name == "perplexity":
        rows.append(["original", "", *(f"{data['original']['domains'][d]['perplexity']:.2f}" for d in domains)])
    form = "{:.4f}" if name == "kl" else "{:.2f}"
    for size, methods in by_size(data).items():
        for method, found in methods.items():
            cells = [Spread([row["domains"][d][name] for row in found]).words(form) for d in domains]
            rows.append([method, size, *cells])
    return Table(f"{title} by domain", ["method", "size", *domains], rows)
