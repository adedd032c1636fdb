"""Experts that die out while a model trains."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moepress.errors import MoepressError
from moepress.hook import TrainingHook
from moepress.merge import install
from moepress.models.find import find_layers
from moepress.models.layer import CompactSpec, MoELayer, Routing
from moepress.models.taps import before_forward, replaced
from moepress.models.visit import present_forward
from moepress.plan import Group, LayerPlan, Plan
from moepress.plan.survivors import Survivors


class ProgressivePruning(TrainingHook):
    """Takes experts away during training, by a moving average of how often the router chooses them: a few times those
    that it hardly uses, then all that are too many, the least used first. The rest of the training is that of the model
    as it will be. `remove` takes them out of the model, with their rows of the router.

    From when it is made until `remove`, the scores of experts that are gone are -inf: no token can choose them,
    whatever its other scores are. Every process decides alike; sharded parameters are not supported.
    """

    paper = "Task-specific expert pruning, https://arxiv.org/abs/2206.00277"

    def __init__(
        self,
        model: nn.Module,
        keep: int | float,
        steps: int,
        *,
        until: float = 0.5,
        prunings: int = 5,
        threshold: float = 0.1,
        every: int = 4,
        smoothing: float = 0.6,
        skip: Collection[str] = (),
    ) -> None:
        """`keep` experts of each layer (8, or 0.5 of them) are left at the part `until` of all `steps`. Before, at
        `prunings` times, those go that have less than `threshold` of an equal share. Usage is averaged over `every`
        steps, and what was known before counts `smoothing`. Layers named in `skip` stay whole."""
        if steps < 1 or every < 1 or prunings < 1 or not 0 < until <= 1 or not 0 <= smoothing < 1:
            raise MoepressError(
                "progressive pruning: steps, every and prunings must be at least 1, until above 0 and at most 1, "
                "smoothing from 0 to below 1"
            )
        self.horizon = max(1, round(until * steps))
        self.prunings, self.threshold, self.every = prunings, threshold, every
        self.layers = {layer.name: layer for layer in find_layers(model) if layer.name not in skip}
        if not self.layers:
            raise MoepressError("every MoE layer is skipped: there is nothing to prune")
        self.survivors = {name: survivors_of(layer, keep, smoothing) for name, layer in self.layers.items()}
        self.counts = {name: torch.zeros(layer.num_experts) for name, layer in self.layers.items()}
        self.pruned = 0
        self._masks: dict[str, Tensor | None] = {}
        self._installed = ExitStack()
        self._installed.enter_context(before_forward(model, self._see_arguments))
        for layer in self.layers.values():
            forward = partial(self._forward, layer, present_forward(layer.block))
            self._installed.enter_context(replaced(layer.block, "forward", forward))

    def after_step(self, step: int) -> None:
        due = min(step, self.horizon) * self.prunings // self.horizon
        if step % self.every == 0 or (due > self.pruned and step <= self.horizon):
            self._look()
        if due > self.pruned:
            self.pruned = due
            for survivors in self.survivors.values():
                survivors.prune(self.threshold)
        if step >= self.horizon:
            self.finish()

    def settled(self, step: int) -> bool:
        return step >= self.horizon

    def finish(self) -> None:
        """Down to what is kept, also when training stopped before its time."""
        for survivors in self.survivors.values():
            survivors.force()

    def state_dict(self) -> dict[str, Any]:
        return {"pruned": self.pruned, "layers": {name: each.state() for name, each in self.survivors.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if {name: len(each["score"]) for name, each in state["layers"].items()} != {
            name: each.experts for name, each in self.survivors.items()
        }:
            raise MoepressError("the state of the pruning is that of another model")
        self.pruned = state["pruned"]
        for name, each in state["layers"].items():
            self.survivors[name].restore(each)

    def plan(self) -> Plan:
        """Who is left now."""
        return Plan(layers=tuple(self._layer_plan(name) for name in self.layers))

    def remove(self) -> dict[str, CompactSpec]:
        """Take the experts that are gone out of the model; what it computes does not change. Returns what
        `save_compact` wants to know."""
        self.finish()
        self._installed.close()
        specs = {}
        for name, layer in self.layers.items():
            plan = self._layer_plan(name)
            if not plan.untouched:
                specs[name] = install(layer, plan, map(layer.bank.expert, [group.leader for group in plan.groups]))
        return specs

    def _layer_plan(self, name: str) -> LayerPlan:
        survivors = self.survivors[name]
        groups = tuple(Group(leader=e, members=(e,), weights=(1.0,)) for e in survivors.left)
        gone = tuple(sorted(survivors.gone))
        return LayerPlan(name=name, experts=survivors.experts, router="keep", groups=groups, dropped=gone)

    def _see_arguments(self, args: tuple, kwargs: dict) -> None:
        """Which tokens are padding."""
        own = kwargs.get("attention_mask")
        decoder = kwargs.get("decoder_attention_mask") if "decoder_input_ids" in kwargs else own
        self._masks = {"encoder": own, "decoder": decoder}

    def _forward(self, layer: MoELayer, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The block's forward, without those that are gone; while gradients are taken, choices are counted."""
        gone = self.survivors[layer.name].gone
        adapter, block = layer.adapter, layer.block
        # Any parameter of the block is where its router is.
        forbidden_1N = torch.tensor([gone], dtype=torch.long, device=next(block.parameters()).device)
        with adapter.forbidding(block, forbidden_1N, gone) if gone else nullcontext():
            if not torch.is_grad_enabled():
                return run(*args, **kwargs)
            output, routing = adapter.observe(block, lambda: run(*args, **kwargs))
        self._count(layer, routing)
        return output

    def _count(self, layer: MoELayer, routing: Routing) -> None:
        index_TK, mask = routing.index_TK, self._masks.get(layer.stack)
        chosen_TK = (index_TK < layer.num_experts) & (routing.weight_TK != 0)
        if mask is not None and mask.dim() == 2 and mask.numel() == len(index_TK):
            chosen_TK = chosen_TK & mask.reshape(-1, 1).bool().to(chosen_TK.device)
        count_E = torch.bincount(index_TK[chosen_TK], minlength=layer.num_experts)
        self.counts[layer.name] = self.counts[layer.name].to(count_E.device) + count_E

    def _look(self) -> None:
        """Take the counts into the averages."""
        together = torch.distributed.is_available() and torch.distributed.is_initialized()
        for name, count_E in self.counts.items():
            if together:
                torch.distributed.all_reduce(count_E)
            self.survivors[name].see(count_E)
            self.counts[name] = torch.zeros_like(count_E)


def survivors_of(layer: MoELayer, keep: int | float, smoothing: float) -> Survivors:
    """Refuses what the layer's router could not do."""
    experts = layer.num_experts
    kept = int(keep * experts + 1e-9) if isinstance(keep, float) else keep
    if not 1 <= kept <= experts:
        raise MoepressError(f"keep={keep} does not leave between 1 and {experts} experts in layer {layer.name!r}")
    if reason := layer.adapter.rows_refusal(layer.block):
        raise MoepressError(f"layer {layer.name!r} cannot have fewer router rows: {reason}")
    layer.adapter.check(layer.block, CompactSpec(experts, kept, "rows"))
    return Survivors(experts, kept, layer.router.groups, smoothing)
