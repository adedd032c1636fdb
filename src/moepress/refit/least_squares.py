"""Solve the down projections of a compressed layer for the output that the whole layer had.

Given who is routed where, the layer's output is linear in its down projections: with the gated hidden units of all
experts side by side, P (T, k·F), and what is missing in the output, R (T, D), the change ΔW that minimises
‖R − PΔW‖² + λ‖ΔW‖² solves (PᵀP + λ) ΔW = PᵀR. Each token is in few experts, so that the rows of PᵀP that belong to an
expert come from its own tokens only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from moepress.errors import MoepressError
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
        return dict(zip(visit.numbers, (output_TD for _, output_TD in visit.batches_with_output()), strict=True))

    @torch.no_grad()
    def fit(self, visit: LayerVisit, whole: dict[int, Tensor]) -> None:
        layer = visit.layer
        bank, expert_map = layer.bank, layer.adapter.expert_map(layer.block)
        pieces = []
        for i, (batch, output_TD) in zip(visit.numbers, visit.batches_with_output(), strict=True):
            missing_TD = whole.pop(i) - output_TD
            if i in visit.drift:
                missing_TD = missing_TD + visit.drift[i]
            weight_T = visit.token_weight(i, self.relative).to(missing_TD.device).sqrt()
            if expert_map is not None:
                batch = replace(batch, routing=batch.routing.redirected(expert_map))
            pieces.append(Piece(batch, visit.shelf.put(missing_TD.float() / visit.strength), weight_T))
        mean = torch.cat([p.weight_T[p.batch.keep_T] for p in pieces]).square().mean().sqrt()
        for piece in pieces:
            piece.weight_T /= mean
        if bank.num_experts * bank.hidden_units <= self.joint_units:
            change_EDF = _solve_together(bank, pieces, self.ridge)
        else:
            change_EDF = _solve_in_turn(bank, pieces, self.ridge, shelf=visit.shelf)
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

    @property
    def weighted_missing_TD(self) -> Tensor:
        return self.missing_TD * self.weight_T[:, None]


def _solve_together(bank: ExpertBank, pieces: list[Piece], ridge: float) -> Tensor:
    experts, units, width = bank.num_experts, bank.hidden_units, bank.down_EDF.shape[1]
    device = bank.down_EDF.device
    gram_EFEF = torch.zeros(experts, units, experts, units, dtype=torch.float64, device=device)
    right_EFD = torch.zeros(experts, units, width, dtype=torch.float64, device=device)
    for together in _chunks(pieces, units):
        _add_products(bank, together, gram_EFEF, right_EFD)
    gram = gram_EFEF.reshape(experts * units, experts * units)
    gram.diagonal().add_(_shrinkage(float(gram.diagonal().mean()), ridge))
    torch.linalg.cholesky(gram, out=gram)  # it is the largest thing here
    change = torch.cholesky_solve(right_EFD.reshape(experts * units, width), gram)
    return change.reshape(experts, units, width).transpose(1, 2)


def _chunks(pieces: list[Piece], units: int) -> Iterator[list[Piece]]:
    """Batches in groups whose hidden units, one set for each choice of a token, are not too many numbers at a time."""
    limit = 2**28 if pieces[0].missing_TD.is_cuda else 2**25  # small products keep a CPU busy, too
    group: list[Piece] = []
    held = 0
    for piece in pieces:
        size = piece.batch.routing.index_TK.numel() * units
        if group and held + size > limit:
            yield group
            group, held = [], 0
        group.append(piece)
        held += size
    yield group


def _add_products(bank: ExpertBank, pieces: list[Piece], gram_EFEF: Tensor, right_EFD: Tensor) -> None:
    """Add these tokens' PᵀP (lower half) and PᵀR. A token is in K experts, so that only the blocks of the pairs among
    them get anything: one small product for each pair of experts, over the tokens that chose both."""
    experts, choices = bank.num_experts, pieces[0].batch.routing.index_TK.shape[1]
    tokens = sum(len(piece.missing_TD) for piece in pieces)
    device = bank.down_EDF.device
    missing_TD = torch.cat([piece.weighted_missing_TD for piece in pieces])
    units_SF = torch.zeros(tokens * choices, bank.hidden_units, device=device)  # a row for each choice of each token
    expert_TK = torch.full((tokens, choices), -1, dtype=torch.long, device=device)
    start = 0
    for piece in pieces:
        size = len(piece.missing_TD)
        expert_TK[start : start + size] = piece.served_TK(experts)
        start += size
    token_S, slot_S = torch.arange(tokens * choices, device=device) // choices, expert_TK.flatten()
    for e in range(experts):
        row_n = torch.where(slot_S == e)[0]
        units_nF = torch.cat([piece.units(bank, e)[1] for piece in pieces])
        units_SF[row_n] = units_nF
        right_EFD[e] += units_nF.T @ missing_TD[token_S[row_n]]
        gram_EFEF[e, :, e] += units_nF.T @ units_nF
    first_P, second_P = (side.flatten() for side in _pairs(choices, tokens, device))
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
            gram_EFEF[high, :, low] += units_SF[second_P[begin:end]].T @ units_SF[first_P[begin:end]]


def _pairs(choices: int, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Every two choices of every token, as rows of a (tokens · choices) table."""
    one_p, other_p = torch.triu_indices(choices, choices, offset=1, device=device)
    base_T1 = torch.arange(tokens, device=device)[:, None] * choices
    return base_T1 + one_p, base_T1 + other_p


def _solve_in_turn(
    bank: ExpertBank, pieces: list[Piece], ridge: float, rounds: int = 2, shelf: Shelf | None = None
) -> Tensor:
    """Gauss–Seidel over experts: each is solved for what the others leave; memory of one expert's Gram matrix."""
    change_EDF = torch.zeros_like(bank.down_EDF, dtype=torch.promote_types(bank.down_EDF.dtype, torch.float32))
    shelf = shelf or Shelf()
    left = [shelf.put(piece.weighted_missing_TD) for piece in pieces]
    energy = sum(float(p.units(bank, e)[1].double().square().sum()) for p in pieces for e in range(bank.num_experts))
    shrinkage = _shrinkage(energy / (bank.num_experts * bank.hidden_units), ridge)
    for _ in range(rounds):
        for e in range(bank.num_experts):
            made = _units(bank, pieces, e, shelf)
            for (token, units_TF), missing_TD in zip(made, left, strict=True):
                missing_TD.index_add_(0, token, units_TF @ change_EDF[e].T.float())
            change_EDF[e] = _ridge(made, left, shrinkage)
            for (token, units_TF), missing_TD in zip(made, left, strict=True):
                missing_TD.index_add_(0, token, units_TF @ change_EDF[e].T.float(), alpha=-1)
            shelf.release()
    return change_EDF


def _units(bank: ExpertBank, pieces: list[Piece], e: int, shelf: Shelf) -> list[tuple[Tensor, Tensor]]:
    made, held = [], 0
    for piece in pieces:
        token, units_TF = piece.units(bank, e)
        held += units_TF.numel()
        made.append((token, units_TF if held < HELD else shelf.put(units_TF)))
    return made


HELD = 2**24
"""Hidden units of one expert on all text that stay in memory; others are put on the shelf."""


def _ridge(made: list[tuple[Tensor, Tensor]], left: list[Tensor], shrinkage: float) -> Tensor:
    """One expert's change (D, F), from its tokens and hidden units by batch and what is missing there."""
    device, units, width = left[0].device, made[0][1].shape[1], left[0].shape[1]
    if sum(len(token) for token, _ in made) < units:  # the same solution from a system in the tokens: Pᵀ (PPᵀ + λ)⁻¹ R
        units_TF = torch.cat([units_nF for _, units_nF in made])
        missing_TD = torch.cat([missing[token] for (token, _), missing in zip(made, left, strict=True)])
        gram = (units_TF @ units_TF.T).double()
        gram.diagonal().add_(shrinkage)
        return torch.cholesky_solve(missing_TD.double(), torch.linalg.cholesky(gram)).T @ units_TF.double()
    gram = torch.zeros(units, units, dtype=torch.float64, device=device)
    right = torch.zeros(units, width, dtype=torch.float64, device=device)
    for (token, units_TF), missing_TD in zip(made, left, strict=True):
        gram += units_TF.T @ units_TF
        right += units_TF.T @ missing_TD[token]
    gram.diagonal().add_(shrinkage)
    return torch.cholesky_solve(right, torch.linalg.cholesky(gram)).T


def _shrinkage(mean_diagonal: float, ridge: float) -> float:
    """λ; an expert that saw no token has a zero Gram matrix and keeps its weights."""
    return max(ridge * mean_diagonal, 1e-12)
