"""Solve the down projections of a compressed layer for the output that the whole layer had.

Given who is routed where, the layer's output is linear in its down projections: with the gated hidden units of all
experts side by side, P (T, k·F), and what is missing in the output, R (T, D), the change ΔW that minimises
‖R − PΔW‖² + λ‖ΔW‖² solves (PᵀP + λ) ΔW = PᵀR. Each token is in few experts, so that the rows of PᵀP that belong to an
expert come from its own tokens only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from moepress.errors import MoepressError
from moepress.exact import rounded, rounder
from moepress.models.layer import ExpertBank, LayerBatch
from moepress.models.probe import Probe
from moepress.models.shelf import Shelf
from moepress.models.visit import LayerVisit
from moepress.refit.base import REFITS, Refit


@REFITS.register("least-squares")
@dataclass(frozen=True)
class LeastSquares(Refit):
    """Ridge least squares of the down projections on the output of the whole layer and on what earlier layers have
    lost against the original model. Closed form, no training."""

    paper = "after MergeMoE, https://arxiv.org/abs/2510.14436"
    shared = True

    target: Literal["auto", "original", "layer"] = "auto"
    """`layer`: the whole layer's output alone; `auto`: that where the residual stream cannot be seen."""
    otherwise: Literal["refuse", "nothing"] = "refuse"
    """What is done with a model whose layers are not linear in their experts."""
    ridge: float = 0.1
    """λ as a share of the mean diagonal of PᵀP."""
    relative: float = 0.5
    """Tokens count as 1 / ‖residual stream‖^(2·relative): the next norm divides a token's error by its stream."""
    joint_units: int = 12288
    """Up to so many hidden units (k·F) all experts are solved together; beyond, one after the other, twice."""

    def __post_init__(self) -> None:
        if not self.ridge > 0:
            raise MoepressError(f"least-squares: ridge must be positive, not {self.ridge}")

    @property
    def reference(self) -> bool:
        return self.target != "layer"

    def suited(self, found: Probe) -> tuple[Refit, str]:
        if found.linear is not None:
            if self.otherwise == "refuse":
                raise MoepressError(found.linear)
            return REFITS.create("none"), f"nothing was refitted: {found.linear}"
        if found.stream is not None and self.reference:
            if self.target == "original":
                raise MoepressError(found.stream)
            return replace(self, target="layer"), f"refitted to each layer's own output: {found.stream}"
        return self, ""

    def remember(self, visit: LayerVisit) -> dict[int, Tensor]:
        visit.strength  # noqa: B018 - measured while the layer is whole
        return dict(zip(visit.here, (output_TD for _, output_TD in visit.batches_with_output()), strict=True))

    @torch.no_grad()
    def fit(self, visit: LayerVisit, whole: dict[int, Tensor]) -> None:
        layer, strength = visit.layer, visit.strength
        bank, expert_map = layer.bank, layer.adapter.expert_map(layer.block)
        pieces: dict[int, Piece] = {}
        for i, (batch, output_TD) in zip(visit.here, visit.batches_with_output(), strict=True):
            missing_TD = whole.pop(i) - output_TD
            if i in visit.drift:
                missing_TD = missing_TD + visit.drift[i]
            weight_T = visit.token_weight(i, self.relative).to(missing_TD.device).sqrt()
            if expert_map is not None:
                batch = replace(batch, routing=batch.routing.redirected(expert_map))
            pieces[i] = Piece(batch, visit.shelf.put(missing_TD.float() / strength), weight_T)
        weight, tokens = (sum(column) for column in zip(*visit.each(lambda i: pieces[i].weight()), strict=True))
        for piece in pieces.values():
            piece.weight_T /= (weight / tokens) ** 0.5
        solve = _solve_together if bank.num_experts * bank.hidden_units <= self.joint_units else _solve_in_turn
        change_EDF = solve(visit, pieces, self.ridge)
        if not all(torch.isfinite(change_DF).all() for change_DF in change_EDF):  # no mask as large as all experts
            raise MoepressError(f"layer {layer.name!r}: the least squares have no finite solution; use a larger ridge")
        bank.down_EDF.add_(change_EDF.to(bank.down_EDF.dtype))
        layer.adapter.write_bank(layer.block, bank)


@dataclass
class Piece:
    """One batch: its routing, what is missing in the output, how much each token counts."""

    batch: LayerBatch
    missing_TD: Tensor
    weight_T: Tensor

    def units(self, bank: ExpertBank, e: int) -> tuple[Tensor, Tensor]:
        """The tokens that expert `e` serves, and its gated, weighted hidden units on them: (T_e,), (T_e, F)."""
        token_n, x_nD, gate_n = self.batch.routing.calls(e)
        real = self.batch.keep_T[token_n]
        token_n, x_nD, gate_n = token_n[real], x_nD[real], gate_n[real].float()
        units_nF = bank.hidden(e, x_nD.to(bank.up_EFD.dtype)).float()
        units_nF = units_nF * (gate_n * self.weight_T[token_n])[:, None]
        one_n, where_n = torch.unique_consecutive(token_n, return_inverse=True)
        if len(one_n) < len(token_n):  # tokens that chose two experts which are now the same
            units_nF = units_nF.new_zeros(len(one_n), units_nF.shape[1]).index_add_(0, where_n, units_nF)
        return one_n, units_nF

    def served_TK(self, experts: int) -> Tensor:
        """Which expert serves each choice of each token; -1 on padding, where none does, and where an earlier choice
        of the token has named it already."""
        index_TK, weight_TK = self.batch.routing.index_TK, self.batch.routing.weight_TK
        served_TK = (index_TK < experts) & (weight_TK != 0) & self.batch.keep_T[:, None]
        expert_TK = torch.where(served_TK, index_TK.long(), -1)
        repeated_TK = (expert_TK[:, :, None] == expert_TK[:, None, :]).tril(-1).any(-1)
        return expert_TK.masked_fill(repeated_TK, -1)

    def rows(self, bank: ExpertBank) -> tuple[Tensor, Tensor]:
        """Which expert serves each choice of each token, and its hidden units: (S,), (S, F) for S = T · K."""
        slot_S = self.served_TK(bank.num_experts).flatten()
        units_SF = torch.zeros(len(slot_S), bank.hidden_units, device=slot_S.device)
        for e in range(bank.num_experts):
            units_SF[torch.where(slot_S == e)[0]] = self.units(bank, e)[1]
        return slot_S, units_SF

    @property
    def weighted_missing_TD(self) -> Tensor:
        return self.missing_TD * self.weight_T[:, None]

    def weight(self) -> tuple[float, int]:
        """The sum of the squared weights of the real tokens, and how many these are."""
        kept_T = self.weight_T[self.batch.keep_T]
        return energy(kept_T), len(kept_T)


def energy(x: Tensor) -> float:
    return float(x.double().square().sum())


@dataclass(frozen=True)
class Sizes:
    """Of PᵀP and PᵀR, over the batches of all processes."""

    trace: float
    of_gram: float
    of_right: float
    """How the products of the batches are rounded (see `exact.py`)."""
    served_E: list[int]
    """How many tokens each expert serves."""

    @classmethod
    def of(cls, visit: LayerVisit, pieces: dict[int, Piece], units: Callable[[Piece], Iterable[Tensor]]) -> Sizes:
        """`units` are those of one expert after the other. No sum of products is larger than Σ‖p‖², or ‖P‖ ‖R‖; R grows
        to at most twice its size while experts are solved in turn."""

        def sums(i: int) -> tuple[float, float, list[int]]:
            found = [(energy(units_nF), len(units_nF)) for units_nF in units(pieces[i])]
            energies, served = zip(*found, strict=True)
            return sum(energies), energy(pieces[i].weighted_missing_TD), list(served)

        traces, missing, served = zip(*visit.each(sums), strict=True)
        trace, total = sum(traces), sum(missing)
        if not math.isfinite(trace + total):
            raise MoepressError(
                f"layer {visit.layer.name!r}: what its experts compute on the calibration text is not finite"
            )
        by_expert = [sum(column) for column in zip(*served, strict=True)]
        return cls(trace, rounder(trace), rounder(2 * math.sqrt(trace * total)), by_expert)


def _solve_together(visit: LayerVisit, pieces: dict[int, Piece], ridge: float) -> Tensor:
    """Hidden units are computed twice if they are too many numbers to be kept."""
    bank = visit.layer.bank
    held = 2**28 if bank.down_EDF.is_cuda else 2**25
    experts, units, width = bank.num_experts, bank.hidden_units, bank.down_EDF.shape[1]
    device = bank.down_EDF.device
    small = sum(piece.batch.routing.index_TK.numel() for piece in pieces.values()) * units <= held
    kept = {i: piece.rows(bank) for i, piece in pieces.items()} if small else {}
    found = {id(pieces[i]): rows for i, rows in kept.items()}
    sizes = Sizes.of(visit, pieces, lambda p: [(found.get(id(p)) or p.rows(bank))[1]])
    gram_EFEF = torch.zeros(experts, units, experts, units, dtype=torch.float64, device=device)
    right_EFD = torch.zeros(experts, units, width, dtype=torch.float64, device=device)
    for i, piece in pieces.items():
        rows = kept.pop(i) if small else piece.rows(bank)
        _add_products(piece, rows, gram_EFEF, right_EFD, sizes)
    visit.team.add_up(gram_EFEF, right_EFD)
    gram = gram_EFEF.reshape(experts * units, experts * units)
    gram.diagonal().add_(_shrinkage(sizes.trace / len(gram), ridge))
    torch.linalg.cholesky(gram, out=gram)  # it is the largest thing here
    change = torch.cholesky_solve(right_EFD.reshape(experts * units, width), gram)
    return change.reshape(experts, units, width).transpose(1, 2)


def _add_products(
    piece: Piece, rows: tuple[Tensor, Tensor], gram_EFEF: Tensor, right_EFD: Tensor, sizes: Sizes
) -> None:
    """Add a batch's PᵀP (lower half) and PᵀR. A token is in K experts, so that only the blocks of the pairs among them
    get anything: one small product for each pair of experts, over the tokens that chose both."""
    (slot_S, units_SF), missing_TD = rows, piece.weighted_missing_TD
    experts, (tokens, choices) = len(gram_EFEF), piece.batch.routing.index_TK.shape
    for e in range(experts):
        row_n = torch.where(slot_S == e)[0]
        if len(row_n):
            units_nF = units_SF[row_n]
            right_EFD[e] += rounded(units_nF.T @ missing_TD[row_n // choices], sizes.of_right)
            gram_EFEF[e, :, e] += rounded(units_nF.T @ units_nF, sizes.of_gram)
    first_P, second_P = (side.flatten() for side in _pairs(choices, tokens, slot_S.device))
    low_P, high_P = slot_S[first_P], slot_S[second_P]
    both = (low_P >= 0) & (high_P >= 0)
    first_P, second_P, low_P, high_P = first_P[both], second_P[both], low_P[both], high_P[both]
    swapped = low_P > high_P
    first_P, second_P = torch.where(swapped, second_P, first_P), torch.where(swapped, first_P, second_P)
    pair_P, order_P = torch.sort(torch.minimum(low_P, high_P) * experts + torch.maximum(low_P, high_P), stable=True)
    first_P, second_P = first_P[order_P], second_P[order_P]
    end = 0
    for pair, count in enumerate(torch.bincount(pair_P, minlength=experts**2).tolist()):
        if count:
            begin, end = end, end + count
            low, high = divmod(pair, experts)
            # The Cholesky factorisation reads the lower half only.
            product = units_SF[second_P[begin:end]].T @ units_SF[first_P[begin:end]]
            gram_EFEF[high, :, low] += rounded(product, sizes.of_gram)


def _pairs(choices: int, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Every two choices of every token, as rows of a (tokens · choices) table."""
    one_p, other_p = torch.triu_indices(choices, choices, offset=1, device=device)
    base_T1 = torch.arange(tokens, device=device)[:, None] * choices
    return base_T1 + one_p, base_T1 + other_p


def _solve_in_turn(visit: LayerVisit, pieces: dict[int, Piece], ridge: float, rounds: int = 2) -> Tensor:
    """Gauss–Seidel over experts: each is solved for what the others leave; memory of one expert's Gram matrix."""
    bank, shelf = visit.layer.bank, visit.shelf
    change_EDF = torch.zeros_like(bank.down_EDF, dtype=torch.promote_types(bank.down_EDF.dtype, torch.float32))
    left = {i: shelf.put(piece.weighted_missing_TD) for i, piece in pieces.items()}
    sizes = Sizes.of(visit, pieces, lambda piece: (piece.units(bank, e)[1] for e in range(bank.num_experts)))
    shrinkage = _shrinkage(sizes.trace / (bank.num_experts * bank.hidden_units), ridge)
    for _ in range(rounds):
        for e in range(bank.num_experts):
            made = _units(bank, pieces, e, shelf)
            for i, (token, units_TF) in made.items():
                left[i].index_add_(0, token, units_TF @ change_EDF[e].T.float())
            change_EDF[e] = _ridge(visit, e, made, left, sizes, shrinkage)
            for i, (token, units_TF) in made.items():
                left[i].index_add_(0, token, units_TF @ change_EDF[e].T.float(), alpha=-1)
            shelf.release()
    return change_EDF


def _units(bank: ExpertBank, pieces: dict[int, Piece], e: int, shelf: Shelf) -> dict[int, tuple[Tensor, Tensor]]:
    made, held = {}, 0
    for i, piece in pieces.items():
        token, units_TF = piece.units(bank, e)
        held += units_TF.numel()
        made[i] = token, units_TF if held < HELD else shelf.put(units_TF)
    return made


HELD = 2**24
"""Hidden units of one expert on all text that stay in memory; others are put on the shelf."""


def _ridge(
    visit: LayerVisit,
    e: int,
    made: dict[int, tuple[Tensor, Tensor]],
    left: dict[int, Tensor],
    sizes: Sizes,
    ridge: float,
) -> Tensor:
    """One expert's change (D, F), from its tokens and hidden units by batch and what is missing there."""
    bank = visit.layer.bank
    device, (width, units) = bank.down_EDF.device, bank.down_EDF.shape[1:]
    if sizes.served_E[e] < units:  # the same solution from a system in the tokens: Pᵀ (PPᵀ + λ)⁻¹ R
        rows = list(visit.each(lambda i: tuple(t.cpu() for t in (made[i][1], left[i][made[i][0]]))))
        units_TF, missing_TD = (torch.cat(column).to(device) for column in zip(*rows, strict=True))
        gram = (units_TF @ units_TF.T).double()
        gram.diagonal().add_(ridge)
        return torch.cholesky_solve(missing_TD.double(), torch.linalg.cholesky(gram)).T @ units_TF.double()
    gram = torch.zeros(units, units, dtype=torch.float64, device=device)
    right = torch.zeros(units, width, dtype=torch.float64, device=device)
    for i, (token, units_TF) in made.items():
        gram += rounded(units_TF.T @ units_TF, sizes.of_gram)
        right += rounded(units_TF.T @ left[i][token], sizes.of_right)
    visit.team.add_up(gram, right)
    gram.diagonal().add_(ridge)
    return torch.cholesky_solve(right, torch.linalg.cholesky(gram)).T


def _shrinkage(mean_diagonal: float, ridge: float) -> float:
    """λ; an expert that saw no token has a zero Gram matrix and keeps its weights."""
    return max(ridge * mean_diagonal, 1e-12)
