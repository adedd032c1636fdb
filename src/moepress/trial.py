"""Try plans out on a copy of a layer and say how far its output ends up from where it should be.

Shape suffixes: T tokens, D width.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moepress.models.layer import MoELayer
from moepress.models.visit import LayerVisit, evenly
from moepress.refit import Refit

Rebuild = Callable[[MoELayer], object]
RELATIVE = 0.5
"""How much a token's residual stream divides its error, see `LayerVisit.token_weight`."""


@dataclass(frozen=True)
class Trial:
    """Weighted squared errors of one plan on held-out batches, every domain counting the same."""

    plain: float
    refitted: float

    @property
    def best(self) -> float:
        return min(self.plain, self.refitted)


def split(visit: LayerVisit, fit_tokens: int = 32768, held_tokens: int = 16384) -> tuple[list[int], list[int]]:
    """Batches to fit on and others to judge by, about so many tokens of each, of all domains alike and spread over
    the text. A domain with one batch alone is fitted only; if there is no other, that batch must do for both."""
    fit: list[int] = []
    held: list[int] = []
    domains = visit.by_domain().values()
    for members in domains:
        size = sum(visit.tokens(i) for i in members) / len(members)
        wanted = [max(1, round(tokens / len(domains) / size)) for tokens in (held_tokens, fit_tokens)]
        judging = evenly(members, min(wanted[0], len(members) // 2))
        held += judging
        fit += evenly([i for i in members if i not in judging], wanted[1])
    return fit, held or fit


def attempt(
    visit: LayerVisit,
    rebuild: Rebuild,
    refit: Refit,
    fit: list[int],
    held: list[int],
    hopeless: float = math.inf,
) -> Trial:
    """Rebuild a copy of the layer, refit it on some batches, judge it by others. One whose error is `hopeless` before
    anything is refitted is given up."""
    whole = {i: visit.observe(i) for i in {*fit, *held} if i in visit.here}
    block = bare_copy(visit.layer)
    trial = visit.beside(block, held)
    rebuild(trial.layer)

    def error() -> float:
        trial.changed()
        return sum(trial.each(error_of))

    def error_of(i: int) -> float:
        batch, output = trial.observe(i)
        missing_TD = flat(whole[i][1], batch.keep_T) - flat(output, batch.keep_T)
        if i in visit.drift:
            missing_TD = missing_TD + visit.drift[i]
        error_T = missing_TD.float().square().sum(-1)
        return float((error_T * trial.token_weight(i, RELATIVE).to(error_T.device)).double().sum())

    plain = error()
    if not refit.visits or plain > hopeless:
        return Trial(plain, plain)
    fitted = visit.beside(block, fit)
    refit.fit(fitted, {i: flat(whole[i][1], whole[i][0].keep_T) for i in fitted.here})
    return Trial(plain, error())


class Damage:
    """What a layer's change does to its output on its own inputs: Σ‖whole − changed‖² / Σ‖whole‖² over some batches of
    every domain. Made while the layer is whole."""

    def __init__(self, visit: LayerVisit, batches: int = 4) -> None:
        self.visit = visit
        self.whole: dict[int, tuple[Tensor, Tensor]] = {}
        self.chosen = visit.spread(batches)
        for i in (i for i in self.chosen if i in visit.here):
            batch, output = visit.observe(i)
            self.whole[i] = flat(output, batch.keep_T)[batch.keep_T].float(), batch.keep_T

    @torch.no_grad()
    def measure(self) -> float:
        def sums(i: int) -> tuple[float, float]:
            whole_TD, keep_T = self.whole[i]
            missed_TD = self.visit.output(i)[keep_T].float() - whole_TD
            return tuple(float(x_TD.square().sum(dtype=torch.float64)) for x_TD in (missed_TD, whole_TD))  # type: ignore[return-value]

        missed, total = (sum(column) for column in zip(*self.visit.each(sums, self.chosen), strict=True))
        return missed / total if total else 0.0


def flat(output: object, keep_T: Tensor) -> Tensor:
    first = output[0] if isinstance(output, tuple) else output
    assert isinstance(first, Tensor)
    return first.reshape(keep_T.numel(), -1)


def bare_copy(layer: MoELayer) -> torch.nn.Module:
    """A copy of its block without what `walk` hung into its forward. The experts' weights are not copied: rebuilding
    gives the copy others."""
    block = layer.block
    shared = {id(p): p for p in layer.adapter.expert_parameters(block)}
    forward = block.__dict__.pop("forward", None)
    try:
        return copy.deepcopy(block, shared)
    finally:
        if forward is not None:
            block.__dict__["forward"] = forward
