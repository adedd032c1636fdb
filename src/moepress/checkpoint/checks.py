"""Is everything there? transformers checks no shapes for a model with a quantizer, and fills gaps at random."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn

from moepress.checkpoint.headers import Header
from moepress.errors import MoepressError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from moepress.models.layer import CompactSpec

MAP = ".expert_map"


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What a checkpoint of this module holds: the tensors themselves, with the marks that they carry."""
    return ((name, t) for name, t in module.state_dict(keep_vars=True).items() if isinstance(t, Tensor))


def check_tensors(model: PreTrainedModel, paths: list[str], shapes: dict[str, tuple[int, ...]]) -> None:
    """Every tensor of the compact layers has arrived in its shape, and of the rest if the model is the saved one:
    another head may have weights of its own."""
    complete = type(model).__name__ in (model.config.architectures or ())
    compact = tuple(f"{path}." for path in paths)
    optional = tuple(model._keys_to_ignore_on_load_missing or ())
    for name, tensor in named_tensors(model):
        if tuple(tensor.shape) != shapes[name]:
            raise MoepressError(
                f"the checkpoint is corrupt: {name} has shape {tuple(tensor.shape)} and should have {shapes[name]}"
            )
        required = name.startswith(compact) or (complete and not _matches(optional, name))
        if required and not _was_loaded(model, name, tensor):
            raise MoepressError(f"the checkpoint is incomplete: {name} is missing")


def _was_loaded(model: nn.Module, name: str, tensor: Tensor) -> bool:
    """transformers marks what it has loaded. Where a model is spread over devices the mark can be gone: weights that
    wait elsewhere are on the meta device, and buffers have been copied."""
    owner = model.get_submodule(name.rpartition(".")[0])
    copied = hasattr(owner, "_hf_hook") and not isinstance(tensor, nn.Parameter)
    return tensor.is_meta or copied or bool(getattr(tensor, "_is_hf_initialized", False))


def check_maps(model: PreTrainedModel, specs: dict[str, CompactSpec], files: Header) -> None:
    """Every redirect points at experts that exist, and will still do so when the model runs."""
    from moepress.models.find import adapter_of

    expected = 0
    for path, spec in specs.items():
        block = model.get_submodule(path)
        expert_map = adapter_of(block).expert_map(block)  # type: ignore[union-attr]
        if expert_map is None:
            continue
        expected += 1
        if expert_map.is_meta:
            raise MoepressError("a compact model cannot be loaded with offload_buffers=True: its routing needs them")
        if int(expert_map.min()) < 0 or int(expert_map.max()) >= spec.physical:
            raise MoepressError(
                f"the checkpoint is corrupt: the expert_map of {path!r} points outside of its {spec.physical} experts"
            )
        held = getattr(getattr(block, "experts", None), "num_experts", spec.physical)
        if held != spec.physical and _ranks_come_first():
            raise MoepressError(
                f"layer {path!r} cannot run with expert parallelism under this version of transformers, which picks "
                "each process's experts before the redirect: use tensor parallelism or a newer transformers"
            )
    found = sum(name.endswith(MAP) for name in files)
    if files and found < expected:
        raise MoepressError(f"the checkpoint is incomplete: it holds {found} of {expected} expert_maps")


def check_factors(model: PreTrainedModel, specs: dict[str, CompactSpec]) -> None:
    """The columns (rows) that S keeps exist, each expert has its own, and none twice."""
    from moepress.models.find import adapter_of

    for path, spec in specs.items():
        block = model.get_submodule(path)
        factors = None if spec.factors is None else adapter_of(block).factors(block)  # type: ignore[union-attr]
        for name, matrix in ({} if factors is None else factors.matrices()).items():
            if matrix.index.is_meta:
                raise MoepressError(
                    "a decomposed model cannot be loaded with offload_buffers=True: it computes with them"
                )
            bounds, index = matrix.bounds(), matrix.index.tolist()
            if bounds[0] != 0 or bounds[-1] != len(index) or bounds != sorted(bounds):
                raise MoepressError(
                    f"the checkpoint is corrupt: the offsets of the {name} matrices of {path!r} are wrong"
                )
            for e in range(matrix.experts):
                own = index[bounds[e] : bounds[e + 1]]
                if len(set(own)) < len(own) or any(not 0 <= i < matrix.choices for i in own):
                    raise MoepressError(
                        f"the checkpoint is corrupt: the {name} matrices of {path!r} keep {matrix.along} outside of "
                        f"their {matrix.choices}, or twice"
                    )


def _ranks_come_first() -> bool:
    """Whether expert parallelism renumbers what the native router returns, before any hook sees it. Later versions
    renumber what the experts are called with."""
    return importlib.util.find_spec("transformers.distributed.expert_parallel") is None


def _matches(patterns: Iterable[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)
