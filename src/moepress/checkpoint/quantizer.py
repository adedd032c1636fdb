"""How plain `from_pretrained` loads a compact checkpoint once moepress is imported.

transformers lets a "quantizer" change the empty model before its weights are loaded. Ours quantises nothing: it gives
each MoE block the shape written in config.json, checks afterwards that every tensor arrived, and leaves. What remains
is an ordinary model of its native class, which trains, casts and saves like any other.
"""

from __future__ import annotations

import copy
import warnings
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from moepress.checkpoint.checks import check_factors, check_maps, check_tensors, named_tensors
from moepress.checkpoint.headers import Header, floating_dtypes, read_headers
from moepress.errors import MoepressError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from moepress.models.layer import CompactSpec

# moepress.models is imported inside functions: this module is imported while transformers itself is being imported,
# and the families' adapters may need transformers complete.

METHOD = "moepress"
FORMAT_VERSION = 1
REQUIRES = "pip install moepress"


@register_quantization_config(METHOD)
class MoepressConfig(QuantizationConfigMixin):
    """`quantization_config` in config.json. `layers`: path of an MoE block -> `CompactSpec` as a dict.
    `guard`: the tensor that is stored with an extra axis, see `guard.py`."""

    def __init__(
        self,
        layers: dict[str, dict[str, Any]] | None = None,
        guard: str | None = None,
        format_version: int = FORMAT_VERSION,
        **_: Any,
    ) -> None:
        if format_version != FORMAT_VERSION:
            raise MoepressError(
                f"this compact checkpoint has format {format_version!r} and this moepress reads format "
                f"{FORMAT_VERSION}: install a newer one with `pip install -U moepress`"
            )
        self.quant_method = METHOD  # type: ignore[assignment]
        self.format_version = format_version
        self.requires = REQUIRES
        self.guard = guard
        self.layers = copy.deepcopy(layers or {})

    def specs(self) -> dict[str, CompactSpec]:
        from moepress.models.layer import CompactSpec

        try:
            return {path: CompactSpec(**spec) for path, spec in self.layers.items()}
        except TypeError as error:
            raise MoepressError(
                f"config.json describes a compact layer in a way unknown to moepress: {error}"
            ) from None


@register_quantizer(METHOD)
class MoepressQuantizer(HfQuantizer):
    requires_calibration = True  # refuses to be applied to a plain checkpoint

    quantization_config: MoepressConfig

    # ---- before loading -----------------------------------------------------------------------------------------

    def preprocess_model(self, model: PreTrainedModel, dtype: torch.dtype | None = None, **kwargs: Any) -> None:
        self.files: Header = read_headers(kwargs.get("checkpoint_files") or [])
        # Older transformers keep the checkpoint's dtype for those tensors of a "pre-quantised" model that they rename
        # or stack. Ours are ordinary weights: where dtypes differ they must be cast like those of any other model.
        self.pre_quantized = hasattr(HfQuantizer, "get_new_dtype") or floating_dtypes(self.files) <= {dtype}
        super().preprocess_model(model, dtype=dtype, **kwargs)

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        from moepress.checkpoint.guard import add_notice

        stored = self.quantization_config.specs()
        self.paths = resolve(stored, model)
        self.specs = {here: stored[path] for path, here in self.paths.items()}
        reshape_blocks(model, self.specs)
        if min(stored) in self.paths:
            add_notice(model, [self.paths[min(stored)]], FORMAT_VERSION)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(model)}
        self.guard = self._name_here(self.quantization_config.guard, model)

    def _name_here(self, stored: str | None, model: PreTrainedModel) -> str | None:
        """The name in this model of a tensor that config.json names."""
        if stored is None:
            return None
        path = next((path for path in self.paths if stored.startswith(f"{path}.")), "")
        prefix = f"{model.base_model_prefix}."
        names = (self.paths.get(path, "") + stored[len(path) :], stored, stored.removeprefix(prefix), prefix + stored)
        return next((name for name in names if name in self.shapes), None)

    def get_weight_conversions(self) -> list:
        from moepress.checkpoint.guard import guard_conversion

        conversions = moved_maps(self.files, self.shapes, self.paths)
        if self.guard is not None:
            # by the name in the file or, where transformers has renamed the module since, by the name here
            names = {str(self.quantization_config.guard), self.guard}
            conversions += [guard_conversion(name, len(self.shapes[self.guard])) for name in sorted(names)]
        return conversions

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        # Never asked for a "pre-quantised" model but about shapes: ours are checked by `checks.py`, which says
        # more than transformers' report.
        return self.pre_quantized

    # ---- after loading ------------------------------------------------------------------------------------------

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        from moepress.checkpoint.compact import attach
        from moepress.models.find import repair

        for reason in repair(model):
            warnings.warn(reason, stacklevel=2)
        check_tensors(model, list(self.specs), self.shapes)
        check_maps(model, self.specs, self.files)
        check_factors(model, self.specs)
        self._leave(model)
        attach(model, self.specs, self.guard)
        return model

    def _leave(self, model: PreTrainedModel) -> None:
        """Take away the marks of a quantised model: code that meets them refuses to train, cast or shard it, and
        `save_pretrained` ignores the state dict that a sharded trainer has gathered for it."""
        self.remove_quantization_config(model)
        for module in model.modules():
            if hasattr(module, "config") and hasattr(module.config, "_is_quantized"):
                del module.config._is_quantized

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_qat_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def resolve(specs: dict[str, CompactSpec], model: PreTrainedModel) -> dict[str, str]:
    """The path in config.json -> the path in this model, which may be the saved model without its head, with another
    head, only its encoder, or the same model as another version of transformers arranges it."""
    from moepress.models.find import adapter_of

    blocks = [name for name, block in model.named_modules() if adapter_of(block) is not None]
    prefix = f"{model.base_model_prefix}."
    found = {}
    for path in specs:
        here = next((p for p in (path, path.removeprefix(prefix), prefix + path) if p in blocks), None)
        if here is None and type(model).__name__ in (model.config.architectures or ()):
            here = _same_tail(path, [block for block in blocks if block not in specs])
            if here is None:
                raise MoepressError(f"config.json describes layer {path!r}, which {type(model).__name__} does not have")
        if here is not None:
            found[path] = here
    if not found or len(set(found.values())) < len(found):
        raise MoepressError(f"the compact layers in config.json are not those of {type(model).__name__}")
    return found


def _same_tail(path: str, blocks: list[str]) -> str | None:
    """The one block that ends like this path, from its layer number on at least."""

    def common(block: str) -> int:
        pairs = zip(reversed(path.split(".")), reversed(block.split(".")), strict=False)
        return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))

    lengths = [common(block) for block in blocks]
    best = max(lengths, default=0)
    numbered = any(part.isdigit() for part in path.split(".")[len(path.split(".")) - best :])
    return blocks[lengths.index(best)] if numbered and lengths.count(best) == 1 else None


def shape_compact(model: PreTrainedModel, described: MoepressConfig | dict[str, Any]) -> None:
    """Give an empty model the shapes of a compact checkpoint that is not going to be loaded."""
    config = described if isinstance(described, MoepressConfig) else MoepressConfig(**described)
    specs = config.specs()
    here = {path: specs[stored] for stored, path in resolve(specs, model).items()}
    reshape_blocks(model, here)
    layers = {path: spec.to_dict() for path, spec in here.items()}
    model.config.quantization_config = MoepressConfig(layers=layers, guard=config.guard)


def moved_maps(files: Header, shapes: dict[str, tuple[int, ...]], paths: dict[str, str]) -> list:
    """Renamings for expert_maps that this version of transformers wants elsewhere in the block: where the router
    returns integers they sit in the router, otherwise in the experts, and families have changed sides."""
    from transformers.core_model_loading import WeightRenaming

    renamings = []
    stored = [name for name in files if name.endswith(".expert_map")]
    for path, here in paths.items():
        old = next((name[len(path) :] for name in stored if name.startswith(f"{path}.")), None)
        new = next(
            (name[len(here) :] for name in shapes if name.startswith(here) and name.endswith("expert_map")), None
        )
        if old is not None and new is not None and old != new:
            renamings += [WeightRenaming(f"^{place}{old}", f"^{place}{new}") for place in {path, here}]
    return renamings


def reshape_blocks(model: nn.Module, specs: dict[str, CompactSpec]) -> None:
    """Give each block of a full-sized model its compact shape."""
    from moepress.models.find import adapter_of

    for path, spec in specs.items():
        block = model.get_submodule(path)
        adapter = adapter_of(block)
        if adapter is None:
            raise MoepressError(f"layer {path!r} is no MoE layer that moepress knows: it is a {type(block).__name__}")
        if adapter.num_experts(block) != spec.experts:
            raise MoepressError(
                f"config.json gives layer {path!r} {adapter.num_experts(block)} experts in one place and "
                f"{spec.experts} in another"
            )
        adapter.reshape(block, spec)
        for module in block.modules():
            # Initialisers must stay away: some walk through as many experts as the config counts, and Zaya's writes
            # over loaded selection biases. Tensors that no file holds need theirs; any other that is not loaded is
            # an error later on.
            module._is_hf_initialized = not module._non_persistent_buffers_set  # type: ignore[assignment]
