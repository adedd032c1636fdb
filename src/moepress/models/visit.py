"""One layer and the calibration batches that wait in front of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from moepress.errors import UnsupportedModel
from moepress.models.layer import LayerBatch, MoELayer, Routing
from moepress.models.shelf import Shelf
from moepress.models.strength import experts_strength
from moepress.team import ALONE, Team

T = TypeVar("T")


@dataclass
class CalibrationBatch:
    """Arguments of one forward pass, and which tokens count, by stack ("encoder", "decoder")."""

    inputs: dict[str, Tensor]
    keep: dict[str, Tensor]
    domain: str = ""


@dataclass
class Stop:
    """A batch waiting in front of a block."""

    layer: MoELayer
    args: tuple
    kwargs: dict

    def put_on(self, shelf: Shelf) -> None:
        self.args, self.kwargs = shelf.put(self.args), shelf.put(self.kwargs)


class LayerVisit:
    """One layer and the batches that wait in front of it, in this process or, where several work together, in another:
    `each` brings together what is made of them."""

    def __init__(
        self,
        layer: MoELayer,
        forward: Callable[..., Any],
        waiting: dict[int, Stop],
        batches: list[CalibrationBatch],
        shelf: Shelf | None = None,
        numbers: list[int] | None = None,
        team: Team = ALONE,
    ) -> None:
        self.layer = layer
        self.team = team
        self.numbers = list(waiting) if numbers is None else numbers
        """Of all batches that wait here, in any process."""
        share = team.share(len(batches))
        self.here = [i for i in self.numbers if i in share]
        """Those of this process, as `drift` and `stream_norm` name them."""
        self._forward = forward
        self._waiting = waiting
        self._batches = batches
        self.shelf = shelf or Shelf()
        """Where what there is one of for every batch is kept."""
        self.outputs: dict[int, Any] = {}
        self.reference = False
        """Whether the original model's stream is known."""
        self.drift: dict[int, Tensor] = {}
        """With `reference`: by batch, how far (T, D) the residual stream behind this layer, whole as it still is, lies
        from the original model's, in units of the block's output. What the block would have to add to make up for
        every change in earlier layers."""
        self.stream_norm: dict[int, Tensor] = {}
        """By batch, the norm (T,) of the residual stream: in front of the decoder layer, or with `reference` the
        original model's behind it. Empty for layers that are their own decoder layer."""
        self._seen: dict[int, tuple[LayerBatch, Any]] | None = None

    def __len__(self) -> int:
        return len(self.numbers)

    @cached_property
    def strength(self) -> float:
        """What the block multiplies its experts' output with. All processes must ask for it together."""
        return next(self.each(lambda i: experts_strength(self, i), self.numbers[:1]))

    def each(self, work: Callable[[int], T], numbers: list[int] | None = None) -> Iterator[T]:
        """What `work` makes of every batch (or of some of them), in their order, wherever they wait. All processes must
        ask for it together, with the same batches; what is made travels between them."""
        numbers = self.numbers if numbers is None else numbers
        if self.team.size == 1:
            yield from (work(i) for i in numbers)
            return
        made = self.team.gather({i: work(i) for i in numbers if i in self.here})
        yield from (next(part[i] for part in made if i in part) for i in numbers)

    def beside(self, block: torch.nn.Module, numbers: list[int]) -> LayerVisit:
        """A visit of some of the batches to another block in this one's place."""
        waiting = {i: self._waiting[i] for i in numbers if i in self.here}
        layer = replace(self.layer, block=block)
        visit = LayerVisit(layer, present_forward(block), waiting, self._batches, self.shelf, numbers, self.team)
        visit.reference, visit.drift, visit.stream_norm = self.reference, self.drift, self.stream_norm
        if "strength" in self.__dict__:  # measured on the layer while it was whole
            visit.strength = self.strength
        visit.remember()
        return visit

    def narrowed(self, i: int, row_N: Tensor) -> LayerVisit | None:
        """A visit of some tokens of one batch, with which routing can be asked for at little cost. None where the block
        does not decide on each token by itself."""
        stop, tokens = self._waiting[i], self.batch_size(i)
        given = [value for value in (*stop.args, *stop.kwargs.values()) if isinstance(value, Tensor)]
        if len(given) != 1 or given[0].numel() != tokens * given[0].shape[-1] or self.layer.router.capacity is not None:
            return None
        few_ND = given[0].reshape(tokens, -1)[row_N]
        few = few_ND[None] if given[0].dim() == 3 else few_ND
        args = tuple(few if value is given[0] else value for value in stop.args)
        kwargs = {name: few if value is given[0] else value for name, value in stop.kwargs.items()}
        keep = {self.layer.stack: self._batches[i].keep[self.layer.stack].reshape(-1)[row_N.cpu()]}
        batch = CalibrationBatch({}, keep, self.domain(i))
        visit = LayerVisit(self.layer, self._forward, {0: Stop(self.layer, args, kwargs)}, [batch])
        there, here = self.observe(i)[0].routing.at(row_N), visit.routing_without(0, [])
        if not torch.equal(there.index_TK, here.index_TK) or not torch.allclose(there.weight_TK, here.weight_TK, 1e-3):
            return None
        return visit

    def batches(self) -> Iterator[LayerBatch]:
        """Run the layer on each batch of this process and show what its router decided. May be called again."""
        for i in self.here:
            yield self.observe(i)[0]

    def batches_with_output(self) -> Iterator[tuple[LayerBatch, Tensor]]:
        """The same with the block's output (T, D), flattened like the tokens."""
        for i in self.here:
            batch, output = self.observe(i)
            yield (
                batch,
                first_of(output).reshape(batch.keep_T.numel(), -1),
            )  # some blocks flatten their output altogether

    def domain(self, i: int) -> str:
        return self._batches[i].domain

    def by_domain(self) -> dict[str, list[int]]:
        """The waiting batches of each domain, in their order."""
        found: dict[str, list[int]] = {}
        for i in self.numbers:
            found.setdefault(self.domain(i), []).append(i)
        return found

    def spread(self, count: int) -> list[int]:
        """About so many batches, equally many of each domain, and at equal distances in the text."""
        domains = self.by_domain().values()
        return [i for members in domains for i in evenly(members, -(-count // len(domains)))]

    def batch_size(self, i: int) -> int:
        """Tokens of a batch, padding and all."""
        return self._batches[i].keep[self.layer.stack].numel()

    def tokens(self, i: int) -> int:
        """Those that count."""
        return int(self._batches[i].keep[self.layer.stack].sum())

    def token_weight(self, i: int, relative: float) -> Tensor:
        """(T,) what the squared error of each token counts: 0 on padding, 1 / ‖residual stream‖^(2·relative) where the
        stream is known, since the next norm divides by it; and all domains that wait here count the same."""
        keep_T = self._batches[i].keep[self.layer.stack].reshape(-1)
        same = sum(self.tokens(j) for j in self.numbers if self.domain(j) == self.domain(i))
        weight_T = keep_T.float() / same
        norm_T = self.stream_norm.get(i)
        if norm_T is None or norm_T.numel() != keep_T.numel():  # unknown, or of several streams side by side
            return weight_T
        norm_T = norm_T.float().clamp_min(1e-6)
        return weight_T.to(norm_T.device) * norm_T ** (-2 * relative)

    def remember(self) -> None:
        """Keep what is observed, which is then computed once only, until the layer has `changed`."""
        self._seen = {}

    def complete(self) -> None:
        """Have the output of every batch, so that all go on from the layer as it is now, whatever becomes of it."""
        for i in self._waiting:
            if i not in self.outputs:
                self.observe(i)

    def changed(self) -> None:
        """Whoever gives the layer other weights says so."""
        if self._seen is not None:
            self._seen.clear()

    def run(self, i: int) -> Any:
        """The block's output on one waiting batch."""
        stop = self._waiting[i]
        return self._forward(*private(stop.args), **private(stop.kwargs))

    def output(self, i: int) -> Tensor:
        """The same (T, D), flattened like the tokens."""
        return first_of(self.run(i)).reshape(self.batch_size(i), -1)

    def observe(self, i: int) -> tuple[LayerBatch, Any]:
        """One waiting batch as the layer sees it, and the block's output as the block returned it."""
        if self._seen is not None and i in self._seen:
            return self._seen[i]
        batch, output = self.shelf.put(self._observe(i))
        self.outputs[i] = output
        if self._seen is not None:
            self._seen[i] = batch, output
        return batch, output

    def routing_without(self, i: int, experts: list[int], each_T: Tensor | None = None) -> Routing:
        """What the model's own router decides on one batch when it may choose none of some experts and, with `each_T`,
        not that one expert of each token either."""
        forbidden_TN = torch.tensor(experts, dtype=torch.long, device=self.layer.router.weight_ED.device)[None]
        if each_T is not None:
            forbidden_TN = torch.cat([forbidden_TN.expand(len(each_T), -1), each_T[:, None]], dim=1)
        adapter, block = self.layer.adapter, self.layer.block
        with adapter.forbidding(block, forbidden_TN, experts), adapter.silent(block):
            routing = self._observe(i)[0].routing
        chosen_TK = routing.index_TK.masked_fill(routing.weight_TK == 0, -1)
        if bool((chosen_TK[:, :, None] == forbidden_TN[:, None, :]).any()):
            raise UnsupportedModel(f"layer {self.layer.name!r}: its router chooses experts that it may not choose")
        return routing

    @torch.no_grad()
    def _observe(self, i: int) -> tuple[LayerBatch, Any]:
        output, routing = self.layer.adapter.observe(self.layer.block, lambda: self.run(i))
        keep_T = self._batches[i].keep[self.layer.stack].reshape(-1).to(routing.hidden_TD.device)
        if keep_T.numel() != routing.hidden_TD.shape[0]:
            raise UnsupportedModel(
                f"layer {self.layer.name!r} saw {routing.hidden_TD.shape[0]} tokens of a batch with {keep_T.numel()}"
            )
        return LayerBatch(routing, keep_T, self._batches[i].domain), output


def evenly(members: list[int], count: int) -> list[int]:
    """So many of the members (all, if there are fewer), at equal distances, from the middle of each stretch."""
    size = len(members)
    count = min(count, size)
    return [members[(2 * n + 1) * size // (2 * count)] for n in range(count)]


def private(arguments: Any) -> Any:
    """A block may change its input in place (jitter, DSA masks); the waiting batch must keep its own."""
    if isinstance(arguments, dict):
        return {name: private(value) for name, value in arguments.items()}
    if isinstance(arguments, tuple):
        return tuple(private(value) for value in arguments)
    return arguments.clone() if isinstance(arguments, Tensor) and arguments.is_floating_point() else arguments


def present_forward(block: torch.nn.Module) -> Callable[..., Any]:
    """The block's forward as it is when called: a compact layer may be of another class than the one it replaces."""
    if "forward" in block.__dict__:  # accelerate patches instances
        return block.forward
    return lambda *args, **kwargs: type(block).forward(block, *args, **kwargs)


def first_of(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output
