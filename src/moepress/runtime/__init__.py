"""The modules that a compact model runs on, where its native ones cannot express the redirect.

All are static subclasses of native classes, put in place by assigning `__class__`: they pickle, their parameters keep
the native names, and whatever looks for the native class still finds it.
"""

from types import MethodType

from torch import nn


def become(module: nn.Module, cls: type[nn.Module]) -> None:
    """Make a module an instance of a subclass of its class."""
    module.__class__ = cls
    if "_old_forward" in module.__dict__:  # accelerate has wrapped the forward and kept the old one, bound
        module._old_forward = MethodType(cls.forward, module)  # type: ignore[assignment]
