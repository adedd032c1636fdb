"""What families have in common whose experts are decomposed: another module holds the matrices, the rest stays."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor, nn

from moepress.errors import MoepressError
from moepress.models.adapter import Adapter, Block
from moepress.models.layer import CompactSpec, ExpertBank
from moepress.runtime.factored import Factored, FactoredRouted, become_factored, factors_of
from moepress.runtime.factors import MATRICES, ExpertFactors


class FactoringAdapter(Adapter):
    factored_form: ClassVar[type[Factored]] = FactoredRouted
    """How the family calls its experts."""

    @abstractmethod
    def experts(self, block: Block) -> Block:
        """The module that holds the experts."""

    @abstractmethod
    def native_bank(self, block: Block) -> ExpertBank:
        """`read_bank` of experts that are stored whole."""

    def drop_native(self, block: Block) -> None:
        """Remove the experts that are stored whole. This default serves parameters of the experts module itself."""
        experts = self.experts(block)
        for name, _ in list(experts.named_parameters(recurse=False)):
            delattr(experts, name)

    def factors(self, block: Block) -> ExpertFactors | None:
        return factors_of(self.experts(block))

    def read_bank(self, block: Block) -> ExpertBank:
        factors = self.factors(block)
        if factors is None:
            return self.native_bank(block)
        dense = {name: tensor.detach() for name, tensor in factors.dense().items()}
        return ExpertBank(activation=self.experts(block).activate, **dense)

    def write_bank(self, block: Block, bank: ExpertBank) -> None:
        if self.factors(block) is not None:
            raise MoepressError("these experts are decomposed: whole matrices cannot be written into them")
        self.write_native(block, bank)

    def write_native(self, block: Block, bank: ExpertBank) -> None:
        """`write_bank` of experts that are stored whole."""
        super().write_bank(block, bank)

    def write_experts(self, block: Block, experts: Iterable[dict[str, Tensor]]) -> None:
        own = self.native_bank(block)
        with torch.no_grad():
            for e, expert in zip(range(own.num_experts), experts, strict=True):
                for name, place in own.expert(e).items():
                    place.copy_(expert[name])

    def expert_parameters(self, block: Block) -> list[nn.Parameter]:
        return [p for p in self.experts(block).parameters() if p.dim() > 1]

    def expert_tensors(self, block: Block) -> list[Tensor]:
        factors = self.factors(block)
        return super().expert_tensors(block) if factors is None else [*factors.parameters(), *factors.buffers()]

    def factor(self, block: Block, spec: CompactSpec) -> ExpertFactors:
        assert spec.factors is not None
        experts, old = self.experts(block), self.factors(block)
        if old is None:
            bank = self.native_bank(block)
            width, hidden = bank.up_EFD.shape[2], bank.hidden_units
            named = bank.tensors()
            biases = {
                name: next((t for key, t in named.items() if key.startswith(f"{name}_bias")), None) for name in MATRICES
            }
            like = next(p for p in experts.parameters() if p.dim() > 1)
        else:
            width, hidden = old.matrix("down").out_width, old.hidden_units
            biases = {name: getattr(old, f"{name}_bias") for name in MATRICES}
            like = old.matrix("down").thin_ERx
        present = [name for name, bias in biases.items() if bias is not None]
        made = ExpertFactors(spec.physical, width, hidden, spec.factors, present, like)
        with torch.no_grad():
            for name in present:
                getattr(made, f"{name}_bias").copy_(biases[name])
        if old is None:
            self.drop_native(block)
        become_factored(experts, self.factored_form, made)
        return made
