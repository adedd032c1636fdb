"""What families have in common whose router is one linear map: nearly all.

Finding the map, its per-expert tensors, giving it fewer rows, and its raw scores are here; where the experts are and
how the router's choice is seen is up to each layout (`fused.py`, `moduledict.py`, `families/`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from moepress.errors import MoepressError, UnsupportedModel
from moepress.models.adapter import Block, resized
from moepress.models.factoring import FactoringAdapter
from moepress.models.layer import CompactSpec, RouterView, Routing
from moepress.models.rules import rule_of
from moepress.models.taps import after_forward, before_forward, linear_results, replaced
from moepress.runtime.redirect import redirect_experts, redirect_of, redirect_router

COUNT_ATTRIBUTES = (
    "num_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_local_experts",
    "n_total_experts",
    "num_router_classes",
)
PER_EXPERT = ("e_score_correction_bias", "expert_bias", "per_expert_scale", "balancing_biases")
"""Router tensors with one entry per expert, beside the weight and its bias."""
NOT_PER_EXPERT = ("norm", "scale", "tid2eid", "expert_map")
"""Others, whose length may happen to equal the number of experts."""
FORBIDDEN = -1e9
"""A selection bias that nobody can make up for; finite, since some routers add up the scores of a group."""


class LinearRouterAdapter(FactoringAdapter):
    watched: ClassVar[frozenset[str]] = frozenset({"hidden", "index", "weight", "logits"})
    """What must have been seen of a forward before its routing can be told."""
    experts_take_routing = True
    """Whether the experts are a module that is called with hidden states and routing and returns what is shaped like
    the former."""
    index_from_router = False
    """Whether the experts are called with other indices than the router chose, even without a redirect."""

    # ---- where things are -------------------------------------------------------------------------------------

    def experts(self, block: Block) -> Block:
        return block.experts

    def router(self, block: Block) -> Block:
        for name in ("gate", "router"):
            if isinstance(getattr(block, name, None), nn.Module):
                return getattr(block, name)
        raise UnsupportedModel(f"no router found beside the experts of {type(block).__name__}")

    def fixed_rows(self, block: Block) -> int:
        """Router rows after the experts' own, which stay whatever happens to the experts."""
        return 0

    def shown_fixed_rows(self, block: Block) -> int:
        """How many of them are part of the `RouterView`. A family whose fixed rows have no selection bias, say, so
        that its tensors differ in length, keeps them to itself."""
        return self.fixed_rows(block)

    def scoring(self, block: Block) -> tuple[str, nn.Parameter]:
        """Path inside the block and weight of the map that scores the experts."""
        router = self.router(block)
        prefix = _name_of(block, router)
        found = [(f"{prefix}.{name}", p) for name, p in router.named_parameters() if p.dim() == 2]
        found = [(name, p) for name, p in found if name.rpartition(".")[2] == "weight"]
        if len(found) != 1:
            raise UnsupportedModel(f"its router {type(router).__name__} is not one linear map of its input")
        return found[0]

    def router_rows(self, block: Block) -> int:
        return self.scoring(block)[1].shape[0]

    def num_experts(self, block: Block) -> int:
        mapped = self.expert_map(block)
        return self.router_rows(block) - self.fixed_rows(block) if mapped is None else mapped.numel()

    def refusal(self, block: Block) -> str | None:
        try:
            rows = self.router_rows(block)
        except UnsupportedModel as error:
            return str(error)
        stored, dtype = self.stored(block)
        mapped = self.expert_map(block)
        experts = stored if mapped is None else mapped.numel()
        if rows != experts + self.fixed_rows(block):
            return f"its router {type(self.router(block)).__name__} has {rows} rows for {experts} experts"
        with suppress(UnsupportedModel):  # it is said when it is asked for
            if not 1 <= (chosen := self.top_k(block)) <= rows:
                return f"its router {type(self.router(block)).__name__} chooses {chosen} of {rows} experts"
        known = self._per_expert(block)
        for name, tensor in self._router_scope(block):
            per_expert = rows in (*tensor.shape[:1], *tensor.shape[-1:])
            if per_expert and name not in known and not any(word in name for word in NOT_PER_EXPERT):
                return f"its router holds a tensor that moepress does not know: {name}"
        if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            return f"its experts are stored as {dtype}: load the model without quantisation"
        return None

    def stored(self, block: Block) -> tuple[int, torch.dtype]:
        """How many experts have weights, and of which type."""
        if (factors := self.factors(block)) is not None:
            return factors.experts, factors.matrix("down").thin_ERx.dtype
        bank = self.native_bank(block)
        return bank.num_experts, bank.up_EFD.dtype

    # ---- reading and writing the router -----------------------------------------------------------------------

    def _router_scope(self, block: Block) -> Iterator[tuple[str, Tensor]]:
        """Tensors of the router and of the block itself, where some families keep the selection bias."""
        router = self.router(block)
        prefix = _name_of(block, router)
        yield from ((f"{prefix}.{name}", tensor) for name, tensor in _state(router))
        yield from _state(block, recurse=False)

    def _per_expert(self, block: Block) -> dict[str, Tensor]:
        """The same tensors as the modules hold them, those that have one entry per expert."""
        scoring = self.scoring(block)[0]
        names = (scoring, scoring.removesuffix("weight") + "bias")
        return {
            name: tensor
            for name, tensor in self._router_scope(block)
            if name in names or name.rpartition(".")[2] in PER_EXPERT
        }

    def router_tensors(self, block: Block) -> dict[str, Tensor]:
        """Views with the expert as first axis, without the fixed rows that are not shown."""
        rows = self.num_experts(block) + self.shown_fixed_rows(block)
        weight = self.scoring(block)[0]
        found = {name: tensor.data for name, tensor in self._per_expert(block).items()}
        return {name: (t[0] if expert_axis(name == weight, t) else t)[:rows] for name, t in found.items()}

    def read_router(self, block: Block) -> RouterView:
        router, tensors = self.router(block), self.router_tensors(block)
        grouped = getattr(router, "num_group", None) if getattr(router, "topk_method", "") != "greedy" else None
        return RouterView(
            weight_ED=tensors[self.scoring(block)[0]],
            tensors=tensors,
            top_k=self.top_k(block),
            rule=rule_of(router, block),
            groups=grouped or 1,
            topk_groups=(getattr(router, "topk_group", None) or 1) if grouped else 1,
            capacity=self.capacity(block),
            fixed_experts=self.shown_fixed_rows(block),
        )

    def top_k(self, block: Block) -> int:
        router, experts = self.router(block), self.experts(block)
        holders = (router, block, *(getattr(module, "config", None) for module in (router, block, experts)))
        for holder in holders:
            for name in ("top_k", "num_experts_per_tok", "top_k_experts", "moe_topk"):
                value = getattr(holder, name, None)
                if isinstance(value, int) and not isinstance(value, bool):
                    return value
        raise UnsupportedModel(f"{type(router).__name__} does not say how many experts it chooses")

    def capacity(self, block: Block) -> int | None:
        """Tokens per sequence that one expert takes under the installed transformers; None: all."""
        return None

    def write_router(self, block: Block, tensors: dict[str, Tensor]) -> None:
        own = self.router_tensors(block)
        for name, tensor in tensors.items():
            own[name].copy_(tensor)

    # ---- compact form -----------------------------------------------------------------------------------------

    def reshape(self, block: Block, spec: CompactSpec) -> None:
        self.check(block, spec)
        if spec.router == "rows":
            self.reshape_router(block, spec.physical)
        else:
            self.redirect(block, spec)
        self.reshape_experts(block, spec)
        if spec.factors is not None:
            self.factor(block, spec)

    def check(self, block: Block, spec: CompactSpec) -> None:
        """Everything that could be wrong with a spec, before anything is changed."""
        view, experts = self.read_router(block), self.num_experts(block)
        k, kind = spec.physical, type(block).__name__
        if self.factors(block) is not None:
            raise MoepressError(f"the experts of this {kind} are decomposed already, and stay as many as they are")
        if spec.experts != experts:
            raise MoepressError(f"a plan for {spec.experts} experts does not fit a {kind} with {experts}")
        if not 1 <= k <= self.stored(block)[0]:
            raise MoepressError(f"a {kind} with {experts} experts cannot keep {k}")
        if spec.capacity is not None and not self.takes_capacity(block):
            raise MoepressError(f"a {kind} has no expert capacity: leave capacity out")
        if spec.router == "redirect":
            return
        if spec.router != "rows":
            raise MoepressError(f"a compact layer has router='redirect' or 'rows', not {spec.router!r}")
        if self.expert_map(block) is not None:
            raise MoepressError(f"this {kind} is compact already: its router rows are shared and cannot be cut")
        if k < experts and (reason := self.rows_refusal(block)):
            raise MoepressError(f"a {kind} cannot have fewer router rows: {reason}")
        if view.top_k > k + view.fixed_experts:
            raise MoepressError(f"a {kind} chooses {view.top_k} experts per token and cannot keep {k}")
        if view.groups > 1:
            size, rest = divmod(k, view.groups)
            # A group is scored by its two best experts, by most routers; and those left must suffice.
            if rest or size < min(2, experts // view.groups) or size * view.topk_groups < view.top_k:
                raise MoepressError(
                    f"{k} experts do not fit {view.groups} router groups of which {view.topk_groups} are chosen "
                    f"for {view.top_k} experts per token: keep a larger multiple of {view.groups}"
                )

    def takes_capacity(self, block: Block) -> bool:
        return False

    @abstractmethod
    def reshape_experts(self, block: Block, spec: CompactSpec) -> None:
        """Make room for `spec.physical` experts."""

    def redirect(self, block: Block, spec: CompactSpec) -> None:
        """Put the expert_map where the family turns scores into integers: in the router, or else before the experts."""
        fixed = self.fixed_rows(block)
        if self.router_returns_indices(block):
            redirect_router(self.router(block), spec.experts, spec.physical, fixed)
        else:
            redirect_experts(self.experts(block), spec.experts, spec.physical, fixed)

    def router_returns_indices(self, block: Block) -> bool:
        return not isinstance(self.router(block), nn.Linear) or hasattr(self.router(block), "top_k")

    def reshape_router(self, block: Block, k: int) -> None:
        experts, fixed = self.num_experts(block), self.fixed_rows(block)
        scoring = self.scoring(block)[0]
        for name, tensor in self._per_expert(block).items():
            owner_path, _, leaf = name.rpartition(".")
            axis = expert_axis(name == scoring, tensor)
            keep_rows(block.get_submodule(owner_path), leaf, k, tensor.shape[axis] - experts, axis)
        owner = block.get_submodule(scoring.rpartition(".")[0])
        if isinstance(owner, nn.Linear):
            owner.out_features += k - experts
        for module in (*self.router(block).modules(), block):
            for attribute in COUNT_ATTRIBUTES:
                count = getattr(module, attribute, None)
                if type(count) is int and count in (experts, experts + fixed):
                    setattr(module, attribute, count - experts + k)

    def expert_map(self, block: Block) -> Tensor | None:
        return redirect_of(self.router(block), self.experts(block))

    # ---- calibration ------------------------------------------------------------------------------------------

    def observe(self, block: Block, run: Callable[[], Any]) -> tuple[Any, Routing]:
        seen: dict[str, Tensor] = {}
        router, weight = self.router(block), self.scoring(block)[1]

        def after_map(_: tuple, output: Any) -> None:
            seen["logits"] = output

        with ExitStack() as stack:
            tap = stack.enter_context(linear_results(router, tuple(weight.shape)))
            for module in router.modules():
                # A quantised or adapted linear module computes its result without a call of F.linear.
                if isinstance(module, nn.Linear) and module.weight is weight and module is not router:
                    stack.enter_context(after_forward(module, after_map))
            self.watch(block, seen, stack)
            output = run()
        if tap.result is not None:
            seen["logits"] = tap.result
        if "logits" in seen:
            rows = self.num_experts(block) + self.shown_fixed_rows(block)
            seen["logits"] = seen["logits"].reshape(-1, seen["logits"].shape[-1])[:, :rows]
        if missing := self.watched - set(seen):
            raise UnsupportedModel(f"{type(block).__name__} did not show its {', '.join(sorted(missing))}")
        return output, self.routing(block, seen)

    @contextmanager
    def forbidding(self, block: Block, forbidden_TN: Tensor, everywhere: list[int]) -> Iterator[None]:
        biases = [t for name, t in self.router_tensors(block).items() if "bias" in name]
        before = [t.clone() for t in biases]
        with linear_results(self.router(block), tuple(self.scoring(block)[1].shape), forbidden_TN):
            for bias in biases:
                bias[everywhere] = FORBIDDEN
            try:
                yield
            finally:
                for bias, values in zip(biases, before, strict=True):
                    bias.copy_(values)

    def silent(self, block: Block) -> AbstractContextManager[None]:
        return replaced(self.experts(block), "forward", _silence) if self.experts_take_routing else nullcontext()

    def watch(self, block: Block, seen: dict[str, Tensor], stack: ExitStack) -> None:
        """Enter hooks on `stack` that put hidden (T, D), index (T, K) and weight (T, K) into `seen`. These suit
        experts that are called with hidden states, indices and weights."""

        def experts_called(args: tuple, kwargs: dict) -> None:
            tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
            index = next(t for t in tensors if not t.is_floating_point())
            floats = [t for t in tensors if t.is_floating_point()]
            seen["hidden"] = floats[0].reshape(-1, floats[0].shape[-1])
            seen.setdefault("index", index)
            seen["weight"] = next(t for t in floats[1:] if t.shape == index.shape)

        def router_chose(_: tuple, output: Any) -> None:
            seen["index"] = self.router_index(block, output)

        stack.enter_context(before_forward(self.experts(block), experts_called))
        if self.index_from_router or isinstance(getattr(self.router(block), "expert_map", None), Tensor):
            # The experts are called with physical indices; what the router chose is seen before the redirect.
            stack.enter_context(after_forward(self.router(block), router_chose))

    def router_index(self, block: Block, output: Any) -> Tensor:
        """The chosen experts in the router's output."""
        return next(t for t in output if isinstance(t, Tensor) and not t.is_floating_point())

    def routing(self, block: Block, seen: dict[str, Tensor]) -> Routing:
        return Routing(seen["hidden"], seen["index"], seen["weight"], seen["logits"])


def _silence(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.zeros_like(hidden)


def keep_rows(owner: Block, leaf: str, k: int, tail: int, axis: int = 0) -> None:
    """Give a tensor `k` uninitialised rows, followed by its last `tail` rows as they were."""
    old = getattr(owner, leaf)
    shape = list(old.shape)
    shape[axis] = k + tail
    new = resized(old, *shape)
    if tail:
        new.data.narrow(axis, k, tail).copy_(old.data.narrow(axis, old.shape[axis] - tail, tail))
    setattr(owner, leaf, new if isinstance(new, nn.Parameter) else new.data)  # a buffer stays (non-)persistent


def expert_axis(is_weight: bool, tensor: Tensor) -> int:
    """The axis of a router tensor that runs over the experts: all but the weight are (E,) or (1, E)."""
    return 0 if is_weight or tensor.dim() == 1 else 1


def _name_of(block: Block, child: nn.Module) -> str:
    return next(name for name, module in block.named_children() if module is child)


def _state(module: nn.Module, recurse: bool = True) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse)]
