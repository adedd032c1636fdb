"""`walk`: the MoE layers of a model one at a time, each with its calibration inputs.

All calibration batches go through the model side by side, in lock-step: each runs the model's own forward in a
greenlet that stops whenever it reaches an MoE block. When every batch has stopped at the same block, the caller gets
that layer, may look at it, may replace its weights, and only then do the batches go on. So a later layer sees what
the changed earlier ones compute (sequential mode), nothing is computed twice, and no family needs its forward
rewritten: masks, positions, relative biases, caches and encoder outputs are simply where Python left them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from greenlet import greenlet
from torch import Tensor

from moepress.errors import MoepressError, UnsupportedModel
from moepress.models.find import find_layers
from moepress.models.implementation import quickest_experts
from moepress.models.layer import LayerBatch, MoELayer, Routing
from moepress.models.taps import replaced


@dataclass
class CalibrationBatch:
    """Arguments of one forward pass, and which tokens count, by stack ("encoder", "decoder")."""

    inputs: dict[str, Tensor]
    keep: dict[str, Tensor]
    domain: str = ""


@dataclass
class _Stop:
    """A batch waiting in front of a block."""

    layer: MoELayer
    args: tuple
    kwargs: dict


class _EnoughSeen(BaseException):
    """Raised inside a forward pass once no further MoE layer is of interest: the rest would be thrown away."""


@dataclass
class _After:
    """A batch waiting behind the module that adds the block's output to the residual stream."""

    output: Any


class LayerVisit:
    """One layer and the batches that wait in front of it."""

    def __init__(
        self,
        layer: MoELayer,
        forward: Callable[..., Any],
        waiting: dict[int, _Stop],
        batches: list[CalibrationBatch],
    ) -> None:
        self.layer = layer
        self._forward = forward
        self._waiting = waiting
        self._batches = batches
        self.outputs: dict[int, Any] = {}
        self.drift: dict[int, Tensor] = {}
        """With `reference`: by batch, how far (T, D) the residual stream behind this layer, whole as it still is, lies
        from the original model's, in units of the block's output. What the block would have to add to make up for
        every change in earlier layers."""
        self.stream_norm: dict[int, Tensor] = {}
        """With `reference`: by batch, the norm (T,) of the original model's residual stream behind this layer."""
        self._seen: dict[int, tuple[LayerBatch, Any]] | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def batches(self) -> Iterator[LayerBatch]:
        """Run the layer on each waiting batch and show what its router decided. May be called more than once."""
        for i in self._waiting:
            yield self.observe(i)[0]

    def batches_with_output(self) -> Iterator[tuple[LayerBatch, Tensor]]:
        """The same with the block's output (T, D), flattened like the tokens."""
        for i in self._waiting:
            batch, output = self.observe(i)
            yield batch, _first(output).reshape(batch.keep_T.numel(), -1)  # some blocks flatten their output altogether

    def domain(self, i: int) -> str:
        return self._batches[i].domain

    def tokens(self, i: int) -> int:
        return int(self._batches[i].keep[self.layer.stack].sum())

    def remember(self) -> None:
        """Keep what is observed, which is then computed once only, until the layer has `changed`."""
        self._seen = {}

    def changed(self) -> None:
        """Whoever gives the layer other weights says so."""
        if self._seen is not None:
            self._seen.clear()

    def run(self, i: int) -> Any:
        """The block's output on one waiting batch."""
        stop = self._waiting[i]
        return self._forward(*_private(stop.args), **_private(stop.kwargs))

    def output(self, i: int) -> Tensor:
        """The same (T, D), flattened like the tokens."""
        output = _first(self.run(i))
        return output.reshape(self._batches[i].keep[self.layer.stack].numel(), -1)

    def observe(self, i: int) -> tuple[LayerBatch, Any]:
        """One waiting batch as the layer sees it, and the block's output as the block returned it."""
        if self._seen is not None and i in self._seen:
            return self._seen[i]
        batch, output = self._observe(i)
        self.outputs[i] = output
        if self._seen is not None:
            self._seen[i] = batch, output
        return batch, output

    def routing_without(self, i: int, experts: list[int]) -> Routing:
        """What the model's own router decides on one batch when it may not choose some experts."""
        with self.layer.adapter.forbidding(self.layer.block, experts):
            routing = self._observe(i)[0].routing
        forbidden = torch.isin(routing.index_TK, torch.tensor(experts, device=routing.index_TK.device))
        if bool((forbidden & (routing.weight_TK != 0)).any()):
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


def _private(arguments: Any) -> Any:
    """A block may change its input in place (jitter, DSA masks); the waiting batch must keep its own."""
    if isinstance(arguments, dict):
        return {name: _private(value) for name, value in arguments.items()}
    if isinstance(arguments, tuple):
        return tuple(_private(value) for value in arguments)
    return arguments.clone() if isinstance(arguments, Tensor) and arguments.is_floating_point() else arguments


def present_forward(block: torch.nn.Module) -> Callable[..., Any]:
    """The block's forward as it is when called: a compact layer may be of another class than the one it replaces."""
    if "forward" in block.__dict__:  # accelerate patches instances
        return block.forward
    return lambda *args, **kwargs: type(block).forward(block, *args, **kwargs)


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """No dropout, no router noise."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextmanager
def without_cache(model: torch.nn.Module) -> Iterator[None]:
    """No key-value cache: it takes memory, and a block that contains attention would write to it once for each time
    that it is run."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    before = [(config, config.use_cache) for config in configs.values() if hasattr(config, "use_cache")]
    try:
        for config, _ in before:
            config.use_cache = False
        yield
    finally:
        for config, use_cache in before:
            config.use_cache = use_cache


def forward_until_enough(model: torch.nn.Module, inputs: dict[str, Tensor]) -> None:
    # Without labels: no loss is wanted, and encoder–decoder batches bring their decoder inputs.
    device = next(model.parameters()).device
    with suppress(_EnoughSeen):
        model(**{name: value.to(device) for name, value in inputs.items() if name != "labels"})


@torch.no_grad()
def walk(
    model: torch.nn.Module,
    batches: list[CalibrationBatch],
    *,
    layers: list[MoELayer] | None = None,
    sequential: bool = False,
    reference: bool = False,
) -> Iterator[LayerVisit]:
    """Yield each MoE layer with its calibration inputs, in the order in which the forward pass reaches them.

    `sequential`: the batches go on through the block as the caller leaves it; otherwise they go on with what the
    block computed when it was observed. Layers that no batch reaches are an error that names them.
    `reference`: each batch has a twin that goes through every layer as it was before the caller changed it, that is
    through the original model; visits then know their `drift`. Implies `sequential` and doubles time and memory.
    """
    if reference:
        yield from _walk_with_reference(model, batches, find_layers(model) if layers is None else layers)
        return
    layers = find_layers(model) if layers is None else layers
    by_block = {id(layer.block): layer for layer in layers}
    forwards = {id(layer.block): present_forward(layer.block) for layer in layers}
    done: set[int] = set()
    main = greenlet.getcurrent()

    def stopping_forward(layer: MoELayer, run: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if id(layer.block) in done:  # a block that is shared between positions is stopped at once only
                return run(*args, **kwargs)
            answer = main.switch(_Stop(layer, args, kwargs))
            if answer is _EnoughSeen:
                raise _EnoughSeen
            return run(*args, **kwargs) if answer is None else answer[0]

        return forward

    runners = [greenlet(forward_until_enough) for _ in batches]
    with evaluating(model), without_cache(model), quickest_experts(model), ExitStack() as undo:
        for layer in layers:
            undo.enter_context(replaced(layer.block, "forward", stopping_forward(layer, forwards[id(layer.block)])))
        undo.callback(_end, runners)
        waiting = {
            i: runner.switch(model, batch.inputs)
            for i, (runner, batch) in enumerate(zip(runners, batches, strict=True))
        }
        while any(stop is not None for stop in waiting.values()):
            layer = next(stop.layer for stop in waiting.values() if stop is not None)
            if astray := [i for i, stop in waiting.items() if stop is None or stop.layer is not layer]:
                raise UnsupportedModel(f"batch {astray[0]} did not reach layer {layer.name!r} together with the others")
            visit = LayerVisit(layer, forwards[id(layer.block)], waiting, batches)
            yield visit
            done.add(id(layer.block))
            last = len(done) == len(by_block)
            for i, runner in enumerate(runners):
                if last:
                    answer: Any = _EnoughSeen
                else:
                    answer = (visit.outputs.pop(i),) if i in visit.outputs and not sequential else None
                waiting[i] = runner.switch(answer)
        if unreached := [layer.name for layer in layers if id(layer.block) not in done]:
            raise MoepressError(
                f"the calibration text never reached layer {unreached[0]!r}; is it the right model head?"
            )


def _walk_with_reference(
    model: torch.nn.Module, batches: list[CalibrationBatch], layers: list[MoELayer]
) -> Iterator[LayerVisit]:
    """Batches and their twins stop twice at each layer: in front of the block, and behind the module that adds the
    block's output to the residual stream. At the second stop the caller's change is added afterwards:
    what the changed block computes differently, times how strongly the stream follows the block."""
    hosts = {id(layer.block): host_of(model, layer) for layer in layers}
    forwards = {id(layer.block): present_forward(layer.block) for layer in layers}
    done: set[int] = set()
    main = greenlet.getcurrent()

    def at_block(layer: MoELayer) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if id(layer.block) in done:
                return forwards[id(layer.block)](*args, **kwargs)
            answer = main.switch(_Stop(layer, args, kwargs))
            if answer is _EnoughSeen:
                raise _EnoughSeen
            return answer

        return forward

    def behind_host(layer: MoELayer, run: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            output = run(*args, **kwargs)
            if id(layer.block) in done:
                return output
            answer = main.switch(_After(output))
            if answer is _EnoughSeen:
                raise _EnoughSeen
            return answer

        return forward

    probe = {name: value[:1] for name, value in batches[0].inputs.items()}
    inputs = [batch.inputs for batch in batches]
    runners = [greenlet(forward_until_enough) for _ in range(2 * len(batches) + 1)]
    count = len(batches)
    with evaluating(model), without_cache(model), quickest_experts(model), ExitStack() as undo:
        for layer in layers:
            host = hosts[id(layer.block)]
            undo.enter_context(replaced(layer.block, "forward", at_block(layer)))
            undo.enter_context(replaced(host, "forward", behind_host(layer, present_forward(host))))
        undo.callback(_end, runners)
        stops = [r.switch(model, i) for r, i in zip(runners, [*inputs, *inputs, probe], strict=True)]
        while stops[0] is not None:
            layer = stops[0].layer
            if any(stop is None or stop.layer is not layer for stop in stops):
                raise UnsupportedModel(f"the batches did not reach layer {layer.name!r} together")
            run = forwards[id(layer.block)]
            visit = LayerVisit(layer, run, dict(enumerate(stops[:count])), batches)
            visit.remember()
            before = [visit.observe(i)[1] for i in range(count)]
            before += [run(*_private(stop.args), **_private(stop.kwargs)) for stop in stops[count:]]
            kick = _kick(_first(before[-1]))
            before[-1] = _with_first(before[-1], _first(before[-1]) + kick)
            outputs = [r.switch(y).output for r, y in zip(runners, before, strict=True)]
            behind = [_first(output) for output in outputs]
            strength = _strength(layer, behind[-1] - behind[count][:1], kick)
            for i in range(count):
                width = behind[i].shape[-1]
                visit.drift[i] = ((behind[count + i] - behind[i]) / strength).reshape(-1, width)
                visit.stream_norm[i] = behind[count + i].reshape(-1, width).norm(dim=1)
            yield visit
            done.add(id(layer.block))
            answers = []
            visit.changed()
            for i in range(count):
                change = _first(visit.run(i)) - _first(before[i])
                answers.append(behind[i] + strength * change.reshape(behind[i].shape))
            answers += [*behind[count:-1], behind[count][:1]]
            answers = [_with_first(output, first) for output, first in zip(outputs, answers, strict=True)]
            del before, visit, outputs
            last = len(done) == len(layers)
            stops = [r.switch(_EnoughSeen if last else a) for r, a in zip(runners, answers, strict=True)]
        if unreached := [layer.name for layer in layers if id(layer.block) not in done]:
            raise MoepressError(f"the calibration text never reached layer {unreached[0]!r}")


def host_of(model: torch.nn.Module, layer: MoELayer) -> torch.nn.Module:
    """The module that adds the block's output to the residual stream: the nearest one above it in a list of layers."""
    path = layer.name.split(".")
    for end in range(len(path) - 1, 0, -1):
        if path[end - 1].isdigit() and isinstance(model.get_submodule(".".join(path[: end - 1])), torch.nn.ModuleList):
            return model.get_submodule(".".join(path[:end]))
    raise UnsupportedModel(f"layer {layer.name!r} is its own decoder layer, so that its residual stream is not seen")


def _strength(layer: MoELayer, change: Tensor, kick: Tensor) -> float:
    """How strongly the stream follows the block's output (1 in most families), measured; it must do so linearly."""
    change, kick = change.reshape(-1).double(), kick.reshape(-1).double()
    strength = float(change @ kick / (kick @ kick))
    if strength == 0 or float((change - strength * kick).norm() / (strength * kick).norm()) > 0.01:
        raise UnsupportedModel(f"layer {layer.name!r}: the residual stream does not follow the block's output linearly")
    return float(f"{strength:.4g}")  # factors are round numbers in configs; what is left is rounding


def _kick(output: Tensor) -> Tensor:
    """A random change of the size of a block's output, always the same."""
    draw = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
    return draw.to(output.device, output.dtype) * output.std()


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _with_first(output: Any, first: Tensor) -> Any:
    return (first, *output[1:]) if isinstance(output, tuple) else first


def _end(runners: list[greenlet]) -> None:
    """Unwind the forward passes that still wait somewhere."""
    for runner in runners:
        if runner and not runner.dead:
            runner.throw(_EnoughSeen)
