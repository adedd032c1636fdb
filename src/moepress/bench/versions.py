"""One Switch layer in all the ways that benchmarks compare, with the same weights wherever that is possible.

Each version is a block that takes and returns hidden states. Versions share parameters, so that all of them together
take hardly more memory than the original layer.

Shape suffixes: B sequences, S tokens of one, T = B * S, D width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from moepress.errors import MoepressError
from moepress.models.families.switch import SwitchAdapter
from moepress.models.layer import CompactSpec, Factors
from moepress.runtime.modules import ModuleBank
from moepress.runtime.switch import choose


@dataclass(frozen=True)
class Squeeze:
    """What is done to a layer."""

    keep: int = 8
    rank: int = 32
    ratio: float = 0.1
    """Share of the columns that S keeps."""

    def check(self, experts: int) -> None:
        if not 1 <= self.keep <= experts:
            raise MoepressError(f"a layer with {experts} experts cannot keep {self.keep}")

    def factors(self, width: int, hidden: int) -> Factors:
        columns = [round(self.ratio * into) * self.keep for into in (width, hidden)]
        return Factors(self.rank, "columns", up=columns[0], down=columns[1])


@dataclass(frozen=True)
class Version:
    words: str
    make: Callable[[Any, Squeeze], nn.Module]
    """Out of the native block of all experts."""
    waits: bool = False
    """Whether it asks the device for numbers, so that CUDA graphs cannot take it."""


def shared_copy(module: nn.Module) -> Any:
    """Other modules with the same parameters."""
    return copy.deepcopy(module, {id(p): p for p in module.parameters()})


def on_device(make: Callable[[], Any], dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    """A module with random weights of the usual size; routers stay in float32, as in these models."""
    with torch.device("meta"):
        module = make()
    module = module.to(dtype).to_empty(device=device).eval()
    if hasattr(module, "tie_weights"):
        module.tie_weights()
    draw = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if "classifier" in name:
                p.data = p.data.float()
            if p.dim() == 1:
                p.fill_(1)
            else:
                p.normal_(0, 1 if "shared" in name else p.shape[-1] ** -0.5, generator=draw)
    return module


def switch_block(width: int, hidden: int, experts: int) -> Any:
    from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

    return SwitchTransformersSparseMLP(switch_config(width, hidden, experts))


def switch_config(width: int, hidden: int, experts: int) -> Any:
    from transformers import SwitchTransformersConfig

    # Capacity, which only some versions of transformers mind, is never reached.
    return SwitchTransformersConfig(  # type: ignore[call-arg]
        d_model=width, d_ff=hidden, num_experts=experts, dropout_rate=0.0, expert_capacity=1 << 20
    )


def sizes(block: Any) -> tuple[int, int, int]:
    """Width, hidden units, experts."""
    hidden, width = block.experts["expert_0"].wi.weight.shape
    return width, hidden, len(block.experts)


# ---- what is compared --------------------------------------------------------------------------------------------


def dense(block: Any, squeeze: Squeeze) -> nn.Module:
    return block.experts["expert_0"]


def dense_quick(block: Any, squeeze: Squeeze) -> nn.Module:
    return Quick(block.experts["expert_0"])


class Quick(nn.Module):
    """One expert with the products that moepress uses: what is gained by these alone."""

    def __init__(self, expert: Any) -> None:
        super().__init__()
        self.expert = expert

    def forward(self, hidden_BSD: Tensor) -> Tensor:
        x_TD = hidden_BSD.reshape(-1, hidden_BSD.shape[-1])
        return ModuleBank([self.expert], "wi", "wo").one(0, x_TD).reshape(hidden_BSD.shape)


def native(block: Any, squeeze: Squeeze) -> nn.Module:
    return block


def aliased(block: Any, squeeze: Squeeze) -> nn.Module:
    """The paper's way to merge: other experts' places are taken by the module of the merged one."""
    other = shared_copy(block)
    for e in range(squeeze.keep, sizes(block)[2]):
        other.experts[f"expert_{e}"] = other.experts[f"expert_{e % squeeze.keep}"]
    return other


def few_rows(block: Any, squeeze: Squeeze) -> nn.Module:
    """The vanilla form: a native block with one router row for each expert that is left."""
    width, hidden, _ = sizes(block)
    with torch.device("meta"):
        other = switch_block(width, hidden, squeeze.keep)
    for e in range(squeeze.keep):
        other.experts[f"expert_{e}"] = block.experts[f"expert_{e}"]
    return _with_rows(other, block, squeeze.keep)


def full(block: Any, squeeze: Squeeze) -> nn.Module:
    experts = sizes(block)[2]
    return _with_rows(_reshaped(block, CompactSpec(experts, experts, "rows")), block, experts)


def merged(block: Any, squeeze: Squeeze) -> nn.Module:
    return _mapped(_reshaped(block, CompactSpec(sizes(block)[2], squeeze.keep)), squeeze)


def merged_few_rows(block: Any, squeeze: Squeeze) -> nn.Module:
    return _with_rows(_reshaped(block, CompactSpec(sizes(block)[2], squeeze.keep, "rows")), block, squeeze.keep)


def decomposed(block: Any, squeeze: Squeeze) -> nn.Module:
    width, hidden, experts = sizes(block)
    other = _reshaped(block, CompactSpec(experts, squeeze.keep, factors=squeeze.factors(width, hidden)))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for matrix in other.experts.factors.matrices().values():
            for p in matrix.parameters():
                p.normal_(0, (matrix.rank + squeeze.ratio * matrix.in_width) ** -0.5)
            count = len(matrix.index) // squeeze.keep
            kept = [torch.randperm(matrix.choices, generator=draw)[:count].sort()[0] for _ in range(squeeze.keep)]
            matrix.index.copy_(torch.cat(kept))
            matrix.offsets.copy_(torch.arange(squeeze.keep + 1) * count)
    return _mapped(other, squeeze)


def grouped(block: Any, squeeze: Squeeze) -> nn.Module:
    return grouped_block()(block, sizes(block)[2])


def grouped_merged(block: Any, squeeze: Squeeze) -> nn.Module:
    return grouped_block()(block, squeeze.keep)


VERSIONS: dict[str, Version] = {
    "dense": Version("dense layer of one expert's size", dense),
    "dense-quick": Version("the same with the products of moepress", dense_quick),
    "native": Version("transformers, all experts", native, waits=True),
    "aliased": Version("transformers, merged by aliasing (the paper)", aliased, waits=True),
    "few-rows": Version("transformers, merged, router pruned", few_rows, waits=True),
    "grouped": Version("grouped_mm of transformers, all experts", grouped),
    "grouped-merged": Version("grouped_mm of transformers, merged", grouped_merged),
    "full": Version("moepress, all experts", full),
    "m-smoe": Version("moepress, merged (M-SMoE)", merged),
    "m-smoe-few-rows": Version("moepress, merged, router pruned", merged_few_rows),
    "mc-smoe": Version("moepress, merged and decomposed (MC-SMoE)", decomposed),
}
SAME = (
    ("dense", "dense-quick"),
    ("native", "full"),
    ("native", "grouped"),
    ("aliased", "m-smoe"),
    ("aliased", "grouped-merged"),
    ("few-rows", "m-smoe-few-rows"),
)
"""Pairs that compute the same."""


def relative(expected: Tensor, found: Tensor) -> float:
    """How far apart two versions that compute the same are."""
    return float((expected - found).norm() / expected.norm().clamp_min(1e-30))


def _reshaped(block: Any, spec: CompactSpec) -> Any:
    other = shared_copy(block)
    SwitchAdapter().reshape(other, spec)
    if spec.factors is None:
        for name, expert in other.experts.items():
            expert.wi.weight, expert.wo.weight = block.experts[name].wi.weight, block.experts[name].wo.weight
    return other


def _mapped(other: Any, squeeze: Squeeze) -> Any:
    table = other.router.expert_map
    table.copy_(torch.arange(len(table), device=table.device) % squeeze.keep)
    return other


def _with_rows(other: Any, block: Any, rows: int) -> Any:
    weight = block.router.classifier.weight.detach()[:rows].clone()
    other.router.classifier.weight = nn.Parameter(weight)
    return other


@cache
def grouped_block() -> Any:
    """A Switch layer whose experts lie in two tensors, as the grouped product of transformers wants them."""
    from transformers.integrations.moe import use_experts_implementation

    class Experts(nn.Module):
        def __init__(self, config: Any, experts: list[Any]) -> None:
            super().__init__()
            self.num_experts = len(experts)
            self.up_proj = nn.Parameter(torch.stack([e.wi.weight.data for e in experts]))
            self.down_proj = nn.Parameter(torch.stack([e.wo.weight.data for e in experts]))
            self.act_fn = experts[0].act

        def forward(self, *_: Any) -> Tensor:
            raise AssertionError("only the grouped product is measured")

    marked = use_experts_implementation(Experts, has_gate=False)  # type: ignore[call-overload]

    class Block(nn.Module):
        def __init__(self, block: Any, keep: int) -> None:
            super().__init__()
            config = switch_config(*sizes(block))
            config._experts_implementation = "grouped_mm"
            self.router = block.router.classifier
            self.keep = keep
            self.experts = marked(config, [block.experts[f"expert_{e}"] for e in range(keep)])

        def forward(self, hidden_BSD: Tensor) -> Tensor:
            logits = self.router(hidden_BSD.to(self.router.weight.dtype))
            index_BS, gate_BS = choose(logits, self.router.weight.dtype, hidden_BSD.dtype)
            index_T1 = (index_BS % self.keep).reshape(-1, 1)
            x_TD = hidden_BSD.reshape(-1, hidden_BSD.shape[-1])
            return self.experts(x_TD, index_T1, gate_BS.reshape(-1, 1)).reshape(hidden_BSD.shape)

    return Block
