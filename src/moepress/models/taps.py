"""Look at what passes through a module while it runs, and leave no trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class LinearTap(TorchFunctionMode):
    """Keeps the result of the linear map with a weight of this shape. Many routers call `F.linear` on a weight of
    their own and then return something else (probabilities, capped logits, choices): no hook sees the raw scores."""

    def __init__(self, shape: tuple[int, ...], forbidden_TN: Tensor | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.forbidden_TN = forbidden_TN
        self.result: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is nn.functional.linear:
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            if tuple(weight.shape) == self.shape:
                if self.forbidden_TN is not None:
                    scores_TE = result.view(-1, self.shape[0])
                    scores_TE.scatter_(1, self.forbidden_TN.expand(len(scores_TE), -1), float("-inf"))
                self.result = result.clone()  # some routers add noise to their scores in place
        return result


@contextmanager
def replaced(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    """Give one module another method for a while."""
    missing = object()
    before = module.__dict__.get(name, missing)
    setattr(module, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(module, name)
        else:
            setattr(module, name, before)


@contextmanager
def linear_results(
    module: nn.Module, shape: tuple[int, ...], forbidden_TN: Tensor | None = None
) -> Iterator[LinearTap]:
    """What the linear map with a weight of this shape yields inside of `module`; N columns of each row can be set to
    -inf on the way."""
    tap, forward = LinearTap(shape, forbidden_TN), module.forward

    def tapped(*args: Any, **kwargs: Any) -> Any:
        with tap:
            return forward(*args, **kwargs)

    with replaced(module, "forward", tapped):
        yield tap


@contextmanager
def method_results(module: nn.Module, name: str, look: Callable[..., None]) -> Iterator[None]:
    """Call `look(result, *args, **kwargs)` whenever `module.name` has run."""
    method = getattr(module, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        look(result, *args, **kwargs)
        return result

    with replaced(module, name, watched):
        yield


@contextmanager
def before_forward(module: nn.Module, look: Callable[[tuple, dict], None]) -> Iterator[None]:
    """Call `look(args, kwargs)` before `module` runs and before any other hook changes its arguments."""

    def hook(_: nn.Module, args: tuple, kwargs: dict) -> None:
        look(args, kwargs)

    handle = module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def after_forward(module: nn.Module, look: Callable[[tuple, Any], None]) -> Iterator[None]:
    """Call `look(args, output)` after `module` has run and before any other hook changes its output."""

    def hook(_: nn.Module, args: tuple, output: Any) -> None:
        look(args, output)

    handle = module.register_forward_hook(hook, prepend=True)
    try:
        yield
    finally:
        handle.remove()
