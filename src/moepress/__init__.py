"""moepress: smaller Mixture-of-Experts models that really load.

Importing this package lets transformers load compact checkpoints. It imports neither torch nor transformers itself;
the public functions do, when they are first used.
"""

from typing import TYPE_CHECKING, Any

from moepress.checkpoint.register import register

if TYPE_CHECKING:
    from moepress.api import compress, evaluate, export
    from moepress.errors import MoepressError
    from moepress.finetuning import finetune
    from moepress.inspection import inspect_model
    from moepress.paper.sizes import paper_sizes
    from moepress.publishing import push
    from moepress.recipe import Recipe
    from moepress.records import record_evaluation, write_report
    from moepress.training import recover

__version__ = "0.1.0"
__all__ = [
    "MoepressError",
    "Recipe",
    "compress",
    "evaluate",
    "export",
    "finetune",
    "inspect_model",
    "paper_sizes",
    "push",
    "record_evaluation",
    "recover",
    "verify",
    "write_report",
]

register()

_PLACES = {
    "compress": "moepress.api",
    "evaluate": "moepress.api",
    "export": "moepress.api",
    "record_evaluation": "moepress.records",
    "write_report": "moepress.records",
    "recover": "moepress.training",
    "finetune": "moepress.finetuning",
    "inspect_model": "moepress.inspection",
    "paper_sizes": "moepress.paper.sizes",
    "push": "moepress.publishing",
    "verify": "moepress.checkpoint.manifest",
    "Recipe": "moepress.recipe",
    "MoepressError": "moepress.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'moepress' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_PLACES[name]), name)
    globals()[name] = value
    return value
