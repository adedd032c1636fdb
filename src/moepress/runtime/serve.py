"""Each token's experts, with the tokens gathered by physical expert: one call of each expert that is asked.

Experts that were merged share one call: a token that chose two of them is given to it once, with the sum of their
weights. There are two ways. *In turn*: one expert after the other, on exactly its tokens; that is the quickest on a
CPU, and needs the counts as numbers. *Together*: grouped products whose sizes follow from the shapes of the input
alone, so that nothing waits for the device, and CUDA graphs and torch.compile can take them.

Shape suffixes: E physical experts, D width, T tokens, K chosen per token, m = T * K choices, n rows in the order of
their experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moepress.runtime.grouped import suits_grouped


@dataclass(frozen=True)
class Groups:
    """Rows in the order of their experts, on the device where they are."""

    ends_E: Tensor
    """After which row each expert's end (int32)."""
    expert_n: Tensor
    """Of each row; the last one of those that nobody asked for."""
    idle_n1: Tensor | None = None
    """Rows at the end that nobody asked for: grouped products leave whatever was in memory there."""

    def quiet(self, y_nO: Tensor) -> Tensor:
        """Zeros in the idle rows and in their gradients: for what flows back into tensors that other rows share."""
        if self.idle_n1 is None or not torch.is_grad_enabled():
            return y_nO
        return y_nO.masked_fill(self.idle_n1, 0)

    @classmethod
    def of(cls, counts: list[int], device: torch.device) -> Groups:
        counts_E = torch.tensor(counts, device=device)
        expert_n = torch.arange(len(counts), device=device).repeat_interleave(counts_E, output_size=sum(counts))
        return cls(counts_E.cumsum(0).int(), expert_n)


class Experts(Protocol):
    """The physical experts of a layer, however they are stored."""

    @property
    def experts(self) -> int: ...

    @property
    def sizes(self) -> tuple[int, ...]:
        """Widths of the products; none if the experts can only be called one by one."""
        ...

    def one(self, e: int, x_nD: Tensor) -> Tensor:
        """Expert `e` on some tokens."""
        ...

    def together(self, x_nD: Tensor, groups: Groups) -> Tensor:
        """All experts, each on its rows."""
        ...


def serve(bank: Experts, x_TD: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """What each token's experts say, times their weights, added up. Indices from the number of experts on stand for
    nothing."""
    if index_TK.shape[-1] > 1:
        index_TK, weight_TK = combined(index_TK, weight_TK, bank.experts)
    else:
        index_TK = index_TK.clamp(max=bank.experts)
    way = together if _may_not_wait(x_TD) and suits_grouped(bank.sizes) else in_turn
    return way(bank, x_TD, index_TK, weight_TK)


def _may_not_wait(x_TD: Tensor) -> bool:
    """torch.compile takes grouped products of bfloat16 only; of others it leaves the experts out of its graph."""
    if torch.compiler.is_compiling():
        return x_TD.dtype == torch.bfloat16
    return x_TD.is_cuda


def combined(index_TK: Tensor, weight_TK: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Of a token's choices that are the same expert the first is left, with the weight of all."""
    same_TKK = index_TK[:, :, None] == index_TK[:, None, :]
    again_TK = same_TKK.tril(-1).any(dim=-1)
    total_TK = torch.where(same_TKK, weight_TK[:, None, :], 0).sum(dim=-1)
    return index_TK.clamp(max=experts).masked_fill(again_TK, experts), total_TK


def in_turn(bank: Experts, x_TD: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
    chosen, weight_m = index_TK.shape[-1], weight_TK.reshape(-1)
    expert_m = index_TK.reshape(-1)
    order_m = expert_m.argsort(stable=True)
    counts = torch.bincount(expert_m, minlength=bank.experts + 1).tolist()
    output_TD = torch.zeros_like(x_TD)
    even = bool(bank.sizes) and not torch.is_grad_enabled()  # nobody is to see the rows that are added
    for e, choice_n in enumerate(order_m.split(counts)[: bank.experts]):
        if choice_n.numel():
            token_n = choice_n // chosen
            rows_n = evened(token_n) if even else token_n
            y_nD = bank.one(e, x_TD[rows_n])[: len(token_n)] * weight_m[choice_n, None]
            output_TD.index_add_(0, token_n, y_nD.to(output_TD.dtype))
    return output_TD


def evened(token_n: Tensor) -> Tensor:
    """Some tokens more, so that their number is a multiple of 8: for every new shape oneDNN writes a new program, which
    can take as long as the product."""
    count = len(token_n)
    return token_n if count <= 8 else torch.cat([token_n, token_n[: -count % 8]])


def together(bank: Experts, x_TD: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
    if x_TD.shape[0] == 0:
        return torch.zeros_like(x_TD)
    (T, chosen), experts = index_TK.shape, bank.experts
    expert_n, order_n = index_TK.reshape(-1).sort(stable=True)
    each_E = torch.arange(experts, device=x_TD.device)
    ends_E = torch.searchsorted(expert_n, each_E, right=True, out_int32=True)
    idle_n1 = (expert_n >= experts)[:, None]
    groups = Groups(ends_E, expert_n.clamp(max=experts - 1), idle_n1)
    y_nD = bank.together(groups.quiet(x_TD[order_n // chosen]), groups)
    y_nD = y_nD.masked_fill(idle_n1, 0) * weight_TK.reshape(-1)[order_n, None]
    back_m = torch.empty_like(order_n).scatter(0, order_n, torch.arange(len(order_n), device=x_TD.device))
    return y_nD[back_m].view(T, chosen, -1).sum(dim=1).to(x_TD.dtype)
