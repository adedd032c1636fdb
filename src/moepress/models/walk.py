"""`walk`: the MoE layers of a model one at a time, each with its calibration inputs.

All calibration batches go through the model side by side, in lock-step: each runs the model's own forward in a
greenlet that stops whenever it reaches an MoE block. When every batch has stopped at the same block, the caller gets
that layer, may look at it, may replace its weights, and only then do the batches go on. So a later layer sees what
the changed earlier ones compute (sequential mode), nothing is computed twice, and no family needs its forward
rewritten: masks, positions, relative biases, caches and encoder outputs are simply where Python left them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from greenlet import greenlet
from torch import Tensor

from moepress.errors import MoepressError, UnsupportedModel
from moepress.models.find import find_layers
from moepress.models.implementation import quickest_experts
from moepress.models.layer import MoELayer
from moepress.models.shelf import Shelf
from moepress.models.taps import before_forward, replaced
from moepress.models.visit import CalibrationBatch, LayerVisit, Stop, first_of, present_forward, private
from moepress.models.weights import Weights
from moepress.team import ALONE, Team


class _EnoughSeen(BaseException):
    """Raised inside a forward pass once no further MoE layer is of interest: the rest would be thrown away."""


@dataclass
class _After:
    """A batch waiting behind the module that adds the block's output to the residual stream."""

    output: Any
    behind: Any = None
    """The residual stream."""

    def put_on(self, shelf: Shelf) -> None:
        self.behind = shelf.put(first_of(self.output))


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


@contextmanager
def prepared(model: torch.nn.Module, weights: Weights, layers: list[MoELayer]) -> Iterator[None]:
    """A model through which batches are about to be sent side by side."""
    with evaluating(model), without_cache(model), quickest_experts(model, weights.device), weights.walking(layers):
        yield


def forward_until_enough(model: torch.nn.Module, inputs: dict[str, Tensor], device: torch.device) -> None:
    # Without labels: no loss is wanted, and encoder–decoder batches bring their decoder inputs.
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
    team: Team = ALONE,
) -> Iterator[LayerVisit]:
    """Yield each MoE layer with its calibration inputs, in the order in which the forward pass reaches them.

    `sequential`: the batches go on through the block as the caller leaves it; otherwise they go on with what the
    block computed when it was observed. Layers that no batch reaches are an error that names them.
    `reference`: each batch has a twin that goes through every layer as it was before the caller changed it, that is
    through the original model; visits then know their `drift`. Implies `sequential` and doubles time and memory.
    `team`: the processes that share the batches; all must walk together. Each sees every layer.
    """
    if reference:
        yield from _walk_with_reference(model, batches, find_layers(model) if layers is None else layers, team)
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
            answer = main.switch(Stop(layer, args, kwargs))
            if answer is _EnoughSeen:
                raise _EnoughSeen
            return run(*args, **kwargs) if answer is None else answer[0]

        return forward

    runners = {i: greenlet(forward_until_enough) for i in team.own(list(range(len(batches))))}
    streams: dict[int, dict[int, Tensor]] = {}
    weights = Weights.of(model)
    shelf = weights.shelf
    go_on = partial(_go_on, model, runners, {i: batches[i].inputs for i in runners})
    with prepared(model, weights, layers), ExitStack() as undo:
        for layer in layers:
            streams[id(layer.block)] = undo.enter_context(_stream_norms(model, layer, runners))
            undo.enter_context(replaced(layer.block, "forward", stopping_forward(layer, forwards[id(layer.block)])))
        undo.callback(_end, runners.values(), shelf)
        waiting = {i: go_on(i, model, batches[i].inputs, weights.device) for i in runners}
        while any(stop is not None for stop in waiting.values()):
            layer = next(stop.layer for stop in waiting.values() if stop is not None)
            if astray := [i for i, stop in waiting.items() if stop is None or stop.layer is not layer]:
                raise UnsupportedModel(f"batch {astray[0]} did not reach layer {layer.name!r} together with the others")
            weights.stopped(layer)
            visit = LayerVisit(
                layer, forwards[id(layer.block)], waiting, batches, shelf, list(range(len(batches))), team
            )
            visit.stream_norm = streams[id(layer.block)]
            yield visit
            done.add(id(layer.block))
            last = len(done) == len(by_block)
            for i in runners:
                if last:
                    answer: Any = _EnoughSeen
                else:
                    answer = (visit.outputs.pop(i),) if i in visit.outputs and not sequential else None
                waiting[i] = go_on(i, answer)
            weights.passed(layer)
        if unreached := [layer.name for layer in layers if id(layer.block) not in done]:
            raise MoepressError(
                f"the calibration text never reached layer {unreached[0]!r}; is it the right model head?"
            )


def _walk_with_reference(
    model: torch.nn.Module, batches: list[CalibrationBatch], layers: list[MoELayer], team: Team
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
            answer = main.switch(Stop(layer, args, kwargs))
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

    numbers = team.own(list(range(len(batches))))
    count = len(numbers)
    inputs = [batches[i].inputs for i in numbers]
    probe = {name: value[:1] for name, value in inputs[0].items()}
    runners = [greenlet(forward_until_enough) for _ in range(2 * count + 1)]
    weights = Weights.of(model)
    shelf = weights.shelf
    given = [*inputs, *inputs, probe]
    go_on = partial(_go_on, model, runners, given)
    with prepared(model, weights, layers), ExitStack() as undo:
        for layer in layers:
            host = hosts[id(layer.block)]
            undo.enter_context(replaced(layer.block, "forward", at_block(layer)))
            undo.enter_context(replaced(host, "forward", behind_host(layer, present_forward(host))))
        undo.callback(_end, runners, shelf)
        stops = [go_on(i, model, each, weights.device) for i, each in enumerate(given)]
        while stops[0] is not None:
            layer = stops[0].layer
            if any(stop is None or stop.layer is not layer for stop in stops):
                raise UnsupportedModel(f"the batches did not reach layer {layer.name!r} together")
            weights.stopped(layer)
            run = forwards[id(layer.block)]
            waiting = dict(zip(numbers, stops, strict=False))
            visit = LayerVisit(layer, run, waiting, batches, shelf, list(range(len(batches))), team)
            visit.reference = True
            visit.remember()
            before = [visit.observe(i)[1] for i in numbers]
            before += [shelf.put(run(*private(stop.args), **private(stop.kwargs))) for stop in stops[count:]]
            kick = _kick(first_of(before[-1]))
            before[-1] = _withfirst_of(before[-1], first_of(before[-1]) + kick)
            stops = [go_on(i, y) for i, y in enumerate(before)]
            outputs, behind = [stop.output for stop in stops], [stop.behind for stop in stops]
            if behind[-1].numel() != kick.numel():
                raise UnsupportedModel(f"layer {layer.name!r}: several residual streams pass it side by side")
            strength = team.first(_strength(layer, behind[-1] - behind[count][:1], kick))
            for at, i in enumerate(numbers):
                width = behind[at].shape[-1]
                visit.drift[i] = shelf.put(((behind[count + at] - behind[at]) / strength).reshape(-1, width))
                visit.stream_norm[i] = behind[count + at].reshape(-1, width).norm(dim=1)
            yield visit
            done.add(id(layer.block))
            visit.changed()
            last = len(done) == len(layers)
            for i, output in enumerate(outputs):
                if last:
                    answer: Any = _EnoughSeen
                elif i < count:
                    change = first_of(visit.run(numbers[i])) - first_of(before[i])
                    answer = _withfirst_of(output, behind[i] + strength * change.reshape(behind[i].shape))
                else:
                    answer = _withfirst_of(output, behind[i] if i < 2 * count else behind[count][:1])
                stops[i] = go_on(i, answer)
            weights.passed(layer)
        if unreached := [layer.name for layer in layers if id(layer.block) not in done]:
            raise MoepressError(f"the calibration text never reached layer {unreached[0]!r}")


@contextmanager
def _stream_norms(model: torch.nn.Module, layer: MoELayer, runners: dict[int, greenlet]) -> Iterator[dict[int, Tensor]]:
    """By batch, the norm (T,) of what enters the decoder layer, once it has."""
    norms: dict[int, Tensor] = {}
    numbers = {runner: i for i, runner in runners.items()}

    def entered(args: tuple, kwargs: dict) -> None:
        stream = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()), None)
        if stream is not None:
            norms[numbers[greenlet.getcurrent()]] = stream.float().norm(dim=-1).reshape(-1)

    try:
        host = host_of(model, layer)
    except UnsupportedModel:
        yield norms
        return
    with before_forward(host, entered):
        yield norms


def host_of(model: torch.nn.Module, layer: MoELayer) -> torch.nn.Module:
    """The module that adds the block's output to the residual stream: the nearest one above it in a list of layers."""
    path = layer.name.split(".")
    modules = dict(model.named_modules(remove_duplicate=False))
    for end in range(len(path) - 1, 0, -1):
        if path[end - 1].isdigit() and isinstance(modules.get(".".join(path[: end - 1])), torch.nn.ModuleList):
            return modules[".".join(path[:end])]
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


def _withfirst_of(output: Any, first: Tensor) -> Any:
    return (first, *output[1:]) if isinstance(output, tuple) else first


def _go_on(model: torch.nn.Module, runners: Any, inputs: Any, i: int, *answer: Any) -> Any:
    """Let a forward pass run up to its next stop, which is None at its end."""
    shelf = Weights.of(model).shelf
    shelf.resume(i)
    stop = runners[i].switch(*answer)
    if stop is not None:
        stop.put_on(shelf)
    shelf.suspended(i, runners[i], model, inputs[i].values())
    return stop


def _end(runners: Iterable[greenlet], shelf: Shelf) -> None:
    """Unwind the forward passes that still wait somewhere."""
    shelf.clear()
    for runner in runners:
        if runner and not runner.dead:
            runner.throw(_EnoughSeen)
