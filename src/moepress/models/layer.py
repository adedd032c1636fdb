"""What an expert layer is to the rest of moepress: an `ExpertBank` and a `RouterView`.

Shape suffixes: E experts, F hidden units of one expert, D input width, T tokens, K experts chosen per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from moepress.models.adapter import Adapter
    from moepress.models.weights import Weights

Activation = Callable[[Tensor | None, Tensor], Tensor]
"""(gate_TF or None, up_TF) -> h_TF: everything that happens between the first and the second matrix of an expert."""


@dataclass(frozen=True)
class ExpertBank:
    """The experts of one layer in canonical form, whatever the family's storage looks like."""

    up_EFD: Tensor
    down_EDF: Tensor
    activation: Activation
    gate_EFD: Tensor | None = None
    up_bias_EF: Tensor | None = None
    gate_bias_EF: Tensor | None = None
    down_bias_ED: Tensor | None = None

    @property
    def num_experts(self) -> int:
        return self.up_EFD.shape[0]

    @property
    def hidden_units(self) -> int:
        return self.up_EFD.shape[1]

    def tensors(self) -> dict[str, Tensor]:
        """The weights by field name, absent ones left out."""
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "activation"}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def map(self, change: Callable[[str, Tensor], Tensor]) -> ExpertBank:
        changed: dict[str, Any] = {name: change(name, tensor) for name, tensor in self.tensors().items()}
        return replace(self, **changed)

    def select(self, experts: list[int] | Tensor) -> ExpertBank:
        index = torch.as_tensor(experts, dtype=torch.long, device=self.up_EFD.device)
        return self.map(lambda _, tensor: tensor[index])

    def expert(self, e: int) -> dict[str, Tensor]:
        """One expert's weights by field name (views)."""
        return {name: tensor[e] for name, tensor in self.tensors().items()}

    def hidden(self, e: int, x_TD: Tensor) -> Tensor:
        """The hidden units of expert `e` on some tokens, after the activation: (T, F)."""
        return self.activation(*preactivations(self.expert(e), x_TD))

    def output(self, e: int, x_TD: Tensor) -> Tensor:
        """The output of expert `e`, before the router's weight is applied: (T, D)."""
        return torch.nn.functional.linear(self.hidden(e, x_TD), self.down_EDF[e], _at(self.down_bias_ED, e))


def preactivations(expert: dict[str, Tensor], x_TD: Tensor) -> tuple[Tensor | None, Tensor]:
    """What one expert's activation is given: (gate_TF or None, up_TF)."""
    up_TF = torch.nn.functional.linear(x_TD, expert["up_EFD"], expert.get("up_bias_EF"))
    if "gate_EFD" not in expert:
        return None, up_TF
    return torch.nn.functional.linear(x_TD, expert["gate_EFD"], expert.get("gate_bias_EF")), up_TF


def _at(bias: Tensor | None, e: int) -> Tensor | None:
    return None if bias is None else bias[e]


UNIT_AXIS = {"up_EFD": 0, "gate_EFD": 0, "down_EDF": 1, "up_bias_EF": 0, "gate_bias_EF": 0}
"""Which axis of one expert's tensor runs over its hidden units. `down_bias_ED` has none."""


def permute_units(expert: dict[str, Tensor], order_F: Tensor) -> dict[str, Tensor]:
    """The same expert with its hidden units in another order; what it computes does not change."""
    return {
        name: tensor.index_select(UNIT_AXIS[name], order_F) if name in UNIT_AXIS else tensor
        for name, tensor in expert.items()
    }


@dataclass(frozen=True)
class RouterView:
    """What routing owns. `tensors` holds every per-expert tensor of the router by its path inside the block,
    each with the expert as its first axis: weight, bias, selection bias, per-expert scale."""

    weight_ED: Tensor
    tensors: dict[str, Tensor]
    top_k: int
    rule: str
    """How scores become choices, for people: "softmax > top-k", "sigmoid + bias > groups > top-k", …"""
    groups: int = 1
    """Router groups (group-limited routing); experts are grouped contiguously."""
    topk_groups: int = 1
    capacity: int | None = None
    fixed_experts: int = 0
    """Rows after the experts that stand for no weights (identity experts); they are always kept."""

    @property
    def selection_bias(self) -> bool:
        """Whether something beside the scores decides on the choice."""
        leaves = [name.rpartition(".")[2] for name in self.tensors]
        return any("bias" in leaf and leaf != "bias" for leaf in leaves)


@dataclass(frozen=True)
class Routing:
    """What the model's own router decided for the tokens of one batch."""

    hidden_TD: Tensor
    """The input of the experts."""
    index_TK: Tensor
    """Original experts, also in a layer that is compact already. Indices from the number of experts on are the
    router's fixed rows (identity, skip). A token that found its expert full keeps the index, with weight 0."""
    weight_TK: Tensor
    """What the output of each chosen expert is multiplied by."""
    logits_TE: Tensor
    """The router's raw scores, before softmax, sigmoid or any bias that only steers the selection. As many columns
    as `RouterView.weight_ED` has rows."""
    input_scale_TK: Tensor | None = None
    """Where a router scales the experts' input instead (Llama 4) and chooses several experts: each one's factor on
    `hidden_TD`. None wherever all chosen experts see `hidden_TD` itself."""

    def calls(self, e: int) -> tuple[Tensor, Tensor, Tensor]:
        """Expert `e` as the layer calls it: the tokens (n), their inputs (n, D) and output weights (n)."""
        token, slot = torch.where((self.index_TK == e) & (self.weight_TK != 0))
        x_nD = self.hidden_TD[token]
        if self.input_scale_TK is not None:
            x_nD = x_nD * self.input_scale_TK[token, slot, None]
        return token, x_nD, self.weight_TK[token, slot]

    def redirected(self, map_E: Tensor) -> Routing:
        """The same with the physical expert of each chosen one, for a layer that redirects. A token can then have an
        expert several times. Indices of fixed rows lie beyond all experts as before."""
        own = self.index_TK < len(map_E)
        physical_TK = map_E[self.index_TK.clamp(max=len(map_E) - 1).long()]
        return replace(self, index_TK=torch.where(own, physical_TK, self.index_TK))

    def at(self, tokens: Tensor) -> Routing:
        """That of some tokens, given by a mask or by their numbers."""
        named: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        return Routing(**{name: t[tokens] for name, t in named.items() if t is not None})


@dataclass(frozen=True)
class LayerBatch:
    """The calibration tokens of one batch as one layer saw them. `keep_T` is False on padding."""

    routing: Routing
    keep_T: Tensor
    domain: str = ""

    def kept(self) -> Routing:
        """The routing of the real tokens only."""
        return self.routing if bool(self.keep_T.all()) else self.routing.at(self.keep_T)

    def thinned(self, count: int) -> LayerBatch:
        """The same with at most so many real tokens, evenly spaced, and no padding."""
        real_n = torch.where(self.keep_T)[0]
        if len(real_n) > count:
            real_n = real_n[torch.linspace(0, len(real_n) - 1, count, device=real_n.device).long()]
        return LayerBatch(self.routing.at(real_n), torch.ones_like(real_n, dtype=torch.bool), self.domain)


@dataclass(frozen=True)
class Factors:
    """How the matrices of a layer are factored, W = UV + S: all that is needed to make room for them."""

    rank: int
    along: str
    """What S keeps of each matrix: whole `columns` or whole `rows`."""
    up: int
    """How many S keeps in the up matrices of all experts of the layer together; likewise for the others."""
    down: int
    gate: int | None = None


@dataclass(frozen=True)
class CompactSpec:
    """The shape of one compact layer: all that is needed to rebuild it empty. Stored in config.json."""

    experts: int
    """Experts of the original layer."""
    physical: int
    """Experts whose weights are stored."""
    router: str = "redirect"
    """`redirect`: as many router rows as original experts and an expert_map; `rows`: one row per physical expert."""
    capacity: int | None = None
    """Tokens that one original expert takes per sequence; None: no limit."""
    factors: Factors | None = None
    """How the experts are decomposed; None: they are stored whole."""

    def __post_init__(self) -> None:
        if isinstance(self.factors, dict):  # as config.json has it
            object.__setattr__(self, "factors", Factors(**self.factors))

    def to_dict(self) -> dict[str, object]:
        return {name: value for name, value in asdict(self).items() if name != "factors" or value is not None}


@dataclass
class MoELayer:
    """One MoE layer of a model: where it is and how to read and write it."""

    name: str
    """Path of the block inside the model: the module that owns both the router and the experts."""
    index: int
    """Position among the model's MoE layers, in the order of the forward pass as modules are listed."""
    block: torch.nn.Module
    adapter: Adapter
    weights: Weights
    stack: str = "decoder"
    """`encoder` or `decoder` (decoder-only models have only the latter)."""

    @property
    def bank(self) -> ExpertBank:
        return self.adapter.read_bank(self.block)

    @property
    def router(self) -> RouterView:
        return self.adapter.read_router(self.block)

    @property
    def num_experts(self) -> int:
        return self.adapter.num_experts(self.block)

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts of this layer."""
        return sum(t.numel() for t in self.adapter.expert_tensors(self.block) if t.is_floating_point())
