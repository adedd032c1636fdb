"""How far the model is from the original on each kind of text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moepress.report.chart import Cells, Chart
from moepress.report.figures.drawing import lying_bars
from moepress.report.style import WARM

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def by_domain(score: dict[str, Any], number: int = 0) -> Chart | None:
    """Of one evaluation against the original."""
    domains = {name: own for name, own in score.get("domains", {}).items() if "kl" in own}
    if not domains:
        return None
    names = sorted(domains, key=lambda name: -domains[name]["kl"])
    kl = [domains[name]["kl"] for name in names]
    perplexities = [
        f"perplexity {domains[name]['original_perplexity']:.4g} → {domains[name]['perplexity']:.4g}" for name in names
    ]

    def draw(figure: Figure, wide: bool) -> Axes:
        axes = figure.subplots()
        lying_bars(axes, names, kl, [f"{value:.3g}" for value in kl], WARM)
        return axes

    columns = ["domain", *domains[names[0]]]
    return Chart(
        f"quality{f'-{number + 1}' if number else ''}",
        "Distance to the original by kind of text",
        "KL divergence in nats per token on held-out text; 0 is the original.",
        draw,
        lambda wide: 0.5 + 0.34 * len(names),
        columns,
        [[name, *domains[name].values()] for name in names],
        Cells(names, [""], [[f"KL {value:.3g}, {words}"] for value, words in zip(kl, perplexities, strict=True)]),
    )
