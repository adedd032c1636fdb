"""How one family stores its experts and router. Found by structure first; see `find.py`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from moepress.models.layer import CompactSpec, ExpertBank, RouterView, Routing

if TYPE_CHECKING:
    from moepress.runtime.factors import ExpertFactors

Block = Any
"""An nn.Module whose attributes only its family knows."""


class Adapter(ABC):
    """Stateless: every method gets the block, the module that owns both the router and the experts.

    The same `reshape` serves an in-memory compression (real tensors) and the loading of a compact checkpoint
    (an empty skeleton on the meta device), so that the two cannot drift apart.
    """

    name: ClassVar[str]
    vanilla: ClassVar[bool] = True
    """Whether a k-row form of this family loads in stock transformers (one count for all layers)."""

    @abstractmethod
    def matches(self, block: nn.Module) -> bool:
        """Whether this block is an MoE block of this family's layout."""

    def refusal(self, block: nn.Module) -> str | None:
        """A sentence that says why this block cannot be compressed, or None."""
        return None

    def rows_refusal(self, block: nn.Module) -> str | None:
        """A sentence that says why this block cannot have fewer router rows (a redirect is fine), or None."""
        return None

    def repair(self, block: nn.Module) -> str | None:
        """Put right, in place, a block that the installed transformers computes wrongly, and say what was wrong."""
        return None

    def check(self, block: nn.Module, spec: CompactSpec) -> None:
        """Raise `MoepressError` if `reshape` would: nothing is changed."""
        return None

    @abstractmethod
    def num_experts(self, block: nn.Module) -> int:
        """Logical experts: how many the router chooses from (identity experts not counted)."""

    @abstractmethod
    def read_bank(self, block: nn.Module) -> ExpertBank:
        """The physical experts in canonical form; views of the parameters wherever that is possible."""

    def widths(self, block: nn.Module) -> tuple[int, int]:
        """Hidden units of an expert, and the width of its input."""
        bank = self.read_bank(block)
        return bank.hidden_units, bank.up_EFD.shape[2]

    def write_bank(self, block: nn.Module, bank: ExpertBank) -> None:
        """Copy a bank of the block's present size into its parameters. This default serves families whose
        `read_bank` returns nothing but views."""
        own = self.read_bank(block).tensors()
        with torch.no_grad():
            for name, tensor in bank.tensors().items():
                own[name].copy_(tensor)

    @abstractmethod
    def write_experts(self, block: nn.Module, experts: Iterable[dict[str, Tensor]]) -> None:
        """The same one expert after the other, as many as the block has."""

    @abstractmethod
    def expert_parameters(self, block: nn.Module) -> list[nn.Parameter]:
        """The large ones among what `reshape` replaces by others, never writing into them."""

    def expert_tensors(self, block: nn.Module) -> list[Tensor]:
        """Everything that is stored for the experts, in whichever form."""
        return list(self.read_bank(block).tensors().values())

    @abstractmethod
    def stored(self, block: nn.Module) -> tuple[int, torch.dtype]:
        """How many experts have weights, and of which type."""

    @abstractmethod
    def factors(self, block: nn.Module) -> ExpertFactors | None:
        """The experts' factored matrices, where they are decomposed."""

    @abstractmethod
    def factor(self, block: nn.Module, spec: CompactSpec) -> ExpertFactors:
        """Make room for the experts in the form of `spec.factors`, uninitialised but for the biases, which are carried
        over; the router stays as it is."""

    @abstractmethod
    def read_router(self, block: nn.Module) -> RouterView: ...

    @abstractmethod
    def write_router(self, block: nn.Module, tensors: dict[str, Tensor]) -> None:
        """Copy per-expert router tensors (names as in `RouterView.tensors`) of the block's present size."""

    @abstractmethod
    def reshape(self, block: nn.Module, spec: CompactSpec) -> None:
        """Give the block the shape of `spec`, its weights uninitialised; add the redirect where it has one."""

    @abstractmethod
    def expert_map(self, block: nn.Module) -> Tensor | None:
        """The redirect's (experts,) int64 buffer, original expert -> physical expert; None without a redirect."""

    @abstractmethod
    def forbidding(self, block: nn.Module, forbidden_TN: Tensor, everywhere: list[int]) -> AbstractContextManager[None]:
        """Inside, the router's scores of N experts of each token (or, given one row, of all) are -inf, and experts
        that are forbidden `everywhere` have no selection bias either."""

    def silent(self, block: nn.Module) -> AbstractContextManager[None]:
        """Inside, the block may leave its experts out: only its routing is of interest."""
        return nullcontext()

    @abstractmethod
    def observe(self, block: nn.Module, run: Callable[[], Any]) -> tuple[Any, Routing]:
        """Run the block's forward through `run()` and return its output and what its own router decided."""


def resized(old: nn.Parameter | Tensor, *shape: int) -> nn.Parameter | nn.Buffer:
    """An uninitialised tensor of another shape with everything else as before."""
    new = torch.empty(*shape, dtype=old.dtype, device=old.device)
    if isinstance(old, nn.Parameter):
        return nn.Parameter(new, requires_grad=old.requires_grad)
    return nn.Buffer(new)
