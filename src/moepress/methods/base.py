from __future__ import annotations

from typing import Any, ClassVar

from moepress.registry import Registry


class Method:
    """A method fills a recipe: `defaults` says what stands where, `presets` are named variations of it.

    A recipe knob outside `uses` is an error for this method, not a silent no-op.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    uses: ClassVar[frozenset[str]]
    defaults: ClassVar[dict[str, Any]]
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    fewer: ClassVar[bool] = True
    """Whether experts become fewer, so that it has to be said how many stay."""


METHODS: Registry[Method] = Registry("method")
