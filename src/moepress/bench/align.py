"""Alignment: SciPy as in the paper's code, and ours, on the same experts in the same run.

A layer is one reference expert and `count` others, with Switch's two matrices. Its experts are unrelated, or copies of
one expert with noise and with their units in another order, as in a model that was made from a dense one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from moepress.align import ALIGNMENTS, SOLVERS, Solution, kinds
from moepress.align.base import Expert
from moepress.align.costs import Units, fill_costs, squared_norms
from moepress.align.solvers.auction import Auction, Run
from moepress.bench.align_tables import drawing, tables_of
from moepress.bench.results import Table, write
from moepress.bench.side_by_side import device_of, known, record
from moepress.bench.timing import Clock, Timing, take_turns
from moepress.progress import track


@dataclass(frozen=True)
class Family:
    words: str
    noise: float | None
    """In standard deviations of the expert that all are copies of; None: unrelated experts."""
    spread: float
    """Of the logarithm of the units' norms."""


FAMILIES = {
    "iid": Family("unrelated", None, 0.0),
    "lognormal": Family("unrelated, log-normal norms 0.3", None, 0.3),
    "upcycled-1": Family("upcycled, noise 1", 1.0, 0.0),
    "upcycled-3": Family("upcycled, noise 3", 3.0, 0.0),
}


@dataclass(frozen=True)
class Settings:
    hidden: int = 3072
    width: int = 768
    count: int = 24
    """Problems of a layer: experts that are aligned to another one."""
    reference: int = 8
    """How many of them SciPy solves in each round."""
    repeats: int = 3
    device: str = "cpu"
    solver: str = "auto"
    model_problems: int = 0
    """Problems of a whole model, solved in one call on CUDA and layer by layer on a CPU. 0: none."""
    families: tuple[str, ...] = tuple(FAMILIES)
    seed: int = 0


def run(settings: Settings, folder: Path) -> tuple[dict[str, Any], list[Table]]:
    """Measure, and write align.json, align.md and align.png."""
    known(settings.families, FAMILIES, "kind of experts")
    settings = replace(settings, reference=min(settings.reference, settings.count))
    clock = Clock.on(device_of(settings.device))
    layers = {name: measure_layer(name, settings, clock) for name in track(settings.families, "layer")}
    lists = {"families": "--family"}
    data = record("align", settings, folder, lists, clock.device, layer=layers, model={})
    if settings.model_problems:
        data["model"] = {name: measure_model(name, settings, clock) for name in track(settings.families, "model")}
    tables = tables_of(data)
    write(folder, "align", data, f"Alignment of experts with {settings.hidden} hidden units", tables, drawing(data))
    return data, tables


def make_layer(family: Family, settings: Settings, seed: int) -> list[Expert]:
    """The reference expert and the others."""
    device, F, D = torch.device(settings.device), settings.hidden, settings.width
    draw = torch.Generator(device).manual_seed(settings.seed + seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, device=device)

    def units() -> Tensor:
        return normal(F, 2 * D) * (family.spread * normal(F, 1)).exp()

    base = units() if family.noise is not None else None
    experts: list[Expert] = []
    for _ in range(settings.count + 1):
        own = units() if base is None or family.noise is None else base + family.noise * normal(F, 2 * D)
        own = own[torch.randperm(F, generator=draw, device=device)] / (2 * D) ** 0.5
        experts.append({"up_EFD": own[:, :D].contiguous(), "down_EDF": own[:, D:].T.contiguous()})
    return experts


def pairs_of(experts: Sequence[Expert]) -> list[tuple[Units, Units]]:
    units = [ALIGNMENTS.create("weight-matching").units(expert, None) or [] for expert in experts]
    return [(units[0], other) for other in units[1:]]


class Layer:
    """The work on one layer, by the paper's code and by ours, on memory that is there before clocks start."""

    def __init__(self, experts: list[Expert], settings: Settings) -> None:
        self.experts, self.settings = experts, settings
        self.pairs = pairs_of(experts)
        F = settings.hidden
        self.costs_NFF = torch.empty(len(self.pairs), F, F, device=settings.device)
        self.rounded_NFF = torch.empty_like(self.costs_NFF)
        self.norms_NF = torch.empty(len(self.pairs), F, device=settings.device)
        self.reference_costs: list[Tensor] = []
        self.reference_orders: list[Tensor] = []
        self.solver = SOLVERS.create(settings.solver)
        self.solutions: list[Solution] = []
        self.steps: Run | None = None
        self.auctioned: Any = None

    def paper_cost(self) -> None:
        """As in the paper's code: one matrix product for each of the two matrices of an expert."""
        first = self.experts[0]
        self.reference_costs = [
            first["up_EFD"] @ other["up_EFD"].T + first["down_EDF"].T @ other["down_EDF"]
            for other in self.experts[1 : self.settings.reference + 1]
        ]

    def paper_solve(self) -> None:
        self.reference_orders = [
            torch.from_numpy(linear_sum_assignment(cost_FF.cpu().numpy(), maximize=True)[1])
            for cost_FF in self.reference_costs
        ]

    def cost(self) -> None:
        fill_costs(self.costs_NFF, self.pairs)
        self.norms_NF = squared_norms([other for _, other in self.pairs])

    def rounded_cost(self) -> None:
        fill_costs(self.rounded_NFF, self.pairs, "bfloat16")

    def solve(self) -> None:
        self.solutions = self.solver.solve_many(self.costs_NFF, self.norms_NF)

    def prove(self) -> None:
        self.steps = Run.of(self.costs_NFF, Auction().gap)
        self.steps.prove(self.norms_NF)

    def bid(self) -> None:
        assert self.steps is not None
        if self.steps.left:
            self.auctioned = self.steps.bid(Auction().bids * self.settings.hidden)

    def settle(self) -> None:
        assert self.steps is not None
        if self.steps.left:
            self.steps.settle(self.auctioned)

    def ours(self) -> dict[str, Callable[[], None]]:
        return {
            "cost": self.cost,
            "cost from bfloat16": self.rounded_cost,
            "solve": self.solve,
            "prove": self.prove,
            "bid": self.bid,
            "certify": self.settle,
        }


def measure_layer(name: str, settings: Settings, clock: Clock) -> dict[str, Any]:
    layer = Layer(make_layer(FAMILIES[name], settings, seed=1), settings)
    take_turns(clock, layer.ours(), repeats=0)  # compiles, and touches all memory
    paper = {"paper's cost": layer.paper_cost, "SciPy": layer.paper_solve}
    timings = take_turns(clock, paper | layer.ours(), settings.repeats, warmup=0)
    problems = dict.fromkeys(paper, settings.reference) | dict.fromkeys(layer.ours(), settings.count)
    rounded = layer.solver.solve_many(layer.rounded_NFF, layer.norms_NF)
    totals = [total(cost_FF, s.order) for cost_FF, s in zip(layer.costs_NFF, layer.solutions, strict=True)]
    lost = [
        (best - total(cost_FF, s.order)) / abs(best)
        for cost_FF, s, best in zip(layer.costs_NFF, rounded, totals, strict=True)
    ]
    compared = list(zip(layer.costs_NFF, layer.reference_orders, layer.solutions, totals, strict=False))
    against = [(total(cost_FF, order) - ours) / abs(ours) for cost_FF, order, _, ours in compared]
    same = [float((order == s.order.cpu()).double().mean()) for _, order, s, _ in compared]
    return {
        "words": FAMILIES[name].words,
        "per_problem": {stage: timing.per(problems[stage]).to_dict() for stage, timing in timings.items()},
        "worst_gap": max(s.gap for s in layer.solutions),
        "worst_against_scipy": max(against),
        "same_as_scipy": sum(same) / len(same),
        "worst_loss_from_bfloat16": max(lost),
        "solved": dict(kinds(layer.solutions)),
        "bids_per_unit": sum(s.bids for s in layer.solutions) / len(layer.solutions) / settings.hidden,
    }


def measure_model(name: str, settings: Settings, clock: Clock) -> dict[str, Any]:
    """All problems of a model whose layers have `count` problems each."""
    F, count, problems = settings.hidden, settings.count, settings.model_problems
    at_once = problems if clock.device.type == "cuda" else count
    costs_NFF = torch.empty(at_once, F, F, device=clock.device)
    norms_NF = torch.empty(at_once, F, device=clock.device)
    solver = SOLVERS.create(settings.solver)
    cost, solve, solutions = 0.0, Timing([0.0]), list[Solution]()
    for start in range(0, problems, at_once):
        held = min(at_once, problems - start)
        for first in range(0, held, count):
            pairs = pairs_of(make_layer(FAMILIES[name], settings, seed=2 + start + first))[: held - first]
            target_NFF = costs_NFF[first : first + len(pairs)]
            cost += clock.time(lambda target_NFF=target_NFF, pairs=pairs: fill_costs(target_NFF, pairs))[0]  # type: ignore[misc]
            norms_NF[first : first + len(pairs)] = squared_norms([other for _, other in pairs])
        if at_once == problems:
            turns = take_turns(clock, {"solve": lambda: solver.solve_many(costs_NFF, norms_NF)}, settings.repeats)
            solve = turns["solve"]
        seconds, found = clock.time(lambda held=held: solver.solve_many(costs_NFF[:held], norms_NF[:held]))  # type: ignore[misc]
        if at_once != problems:
            solve = Timing([solve.seconds[0] + seconds])
        solutions += found
    return {
        "words": FAMILIES[name].words,
        "problems": problems,
        "calls": -(-problems // at_once),
        "cost": cost,
        "solve": solve.to_dict(),
        "worst_gap": max(s.gap for s in solutions),
        "solved": dict(kinds(solutions)),
    }


def total(cost_FF: Tensor, order_F: Tensor) -> float:
    return float(cost_FF.gather(1, order_F.to(cost_FF.device)[:, None]).double().sum())
