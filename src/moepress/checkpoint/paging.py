"""A model whose weights are in its files and come into memory when they are needed.

The model is the one that `from_pretrained` makes, built by it, with the difference that its weights stay on the meta
device. Which tensors of the files make which of the model's is learnt from transformers' own conversion, run on empty
tensors. A module outside of the MoE blocks gets its weights when a forward pass enters it and loses them when all
batches wait behind it; a block has them while the batches wait in front of it and go through it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moepress.checkpoint.checks import named_tensors
from moepress.checkpoint.files import TensorFiles
from moepress.checkpoint.mapping import Part, learn
from moepress.errors import MoepressError, UnsupportedModel
from moepress.memory import give_back
from moepress.models.layer import MoELayer
from moepress.models.precision import NARROW, in_dtype
from moepress.models.stacked import side_by_side
from moepress.models.taps import before_forward
from moepress.models.weights import MARK, Weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def weights_stay_in_files(files: TensorFiles) -> Iterator[None]:
    """Inside, `from_pretrained` reads nothing, and marks the model as one whose weights come later."""
    from transformers import PreTrainedModel

    def load(model: PreTrainedModel, *args: Any, **kwargs: Any) -> tuple[Any, None]:
        given = {**dict(zip(("state_dict", "checkpoint_files", "load_config"), args, strict=False)), **kwargs}
        info, parts = learn(model, files, given["load_config"])
        device = (given["load_config"].device_map or {}).get("", "cpu")
        model.__dict__[MARK] = PagedWeights(model, files, parts, given["load_config"], torch.device(device))
        return info, None

    original = PreTrainedModel.__dict__["_load_pretrained_model"]
    PreTrainedModel._load_pretrained_model = staticmethod(load)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        PreTrainedModel._load_pretrained_model = original  # type: ignore[method-assign]


class PagedWeights(Weights):
    resident = False
    model: PreTrainedModel

    def __init__(
        self, model: PreTrainedModel, files: TensorFiles, parts: list[Part], load_config: Any, device: torch.device
    ) -> None:
        super().__init__(model)
        self.load_config = load_config
        self.files = files
        self.parts = parts
        self.quantised = files.description
        self._device = device
        self._part = {target: part for part in parts for target in part.targets}
        self._wide: torch.dtype | None = None
        self._entered: set[str] = set()
        self._units: dict[str, list[str]] = {}
        self._behind: set[str] = set()
        self._here: set[str] = set()
        self._finite: set[str] = set()
        self.finished: set[str] = set()
        """Layers that have their final shape."""
        self._empty: dict[str, Tensor] = {}
        self._aliases: dict[str, list[str]] = {}

    @property
    def device(self) -> torch.device:
        return self._device

    def settle(self) -> None:
        """Called once the model is complete: weights are tied by now."""
        same: dict[int, list[str]] = {}
        for name, tensor in named_tensors(self.model):
            same.setdefault(id(tensor), []).append(name)
        for names in same.values():
            for name in names:
                self._aliases[name] = names
        for name, tensor in named_tensors(self.model):
            if name in self._part or any(alias in self._part for alias in self._aliases[name]):
                self._empty[name] = tensor

    def targets(self, prefix: str) -> list[str]:
        """The model's tensors under a module that come from the files."""
        return [name for name in self._part if name.startswith(f"{prefix}.")]

    def part(self, target: str) -> Part:
        return self._part[target]

    @contextmanager
    def widened(self, dtype: torch.dtype | None) -> Iterator[None]:
        here = nn.Module()
        for i, buffer in enumerate(buffer for buffer in self.model.buffers() if not buffer.is_meta):
            here.register_buffer(str(i), buffer)
        before, self._wide = self._wide, dtype
        try:
            with in_dtype(here, dtype):
                yield
        finally:
            self._wide = before

    # ---- during a walk ------------------------------------------------------------------------------------------

    @contextmanager
    def walking(self, layers: list[MoELayer]) -> Iterator[None]:
        blocks = tuple(f"{layer.name}." for layer in layers)
        self._units, resident = self._divided(blocks)
        with ExitStack() as stack:
            for path in self._units:
                module = self.model.get_submodule(path)
                stack.enter_context(before_forward(module, lambda *_, path=path: self._enter(path)))
            for layer in layers:
                stack.enter_context(before_forward(layer.block, lambda *_, layer=layer: self._refuse_again(layer)))
            stack.callback(self._leave, layers, resident)
            for names in self._units.values():
                self.drop(names, hollow)
            self.load(resident)
            yield

    def _divided(self, blocks: tuple[str, ...]) -> tuple[dict[str, list[str]], list[str]]:
        """Names of the tensors outside of the blocks: by the module that brings them when it is entered, and those that
        must be there all the time."""
        units: dict[str, list[str]] = {}
        resident = []
        modules = dict(self.model.named_modules(remove_duplicate=False))
        head = self.model.get_output_embeddings()
        for name in self._part:
            for alias in self._aliases[name]:
                owner = alias.rpartition(".")[0]
                if alias.startswith(blocks) or modules[owner] is head:  # no walk gets as far as the head
                    continue
                if path := unit_of(owner, modules):
                    units.setdefault(path, []).append(name)
                else:
                    resident.append(name)
        return units, resident

    def _enter(self, path: str) -> None:
        if path not in self._entered:
            self._entered.add(path)
            self.load(self._units[path])

    def _refuse_again(self, layer: MoELayer) -> None:
        if layer.name in self._behind:
            raise UnsupportedModel(
                f"layer {layer.name!r} is run more than once in a forward pass: load the model and compress that"
            )

    def _leave(self, layers: list[MoELayer], resident: list[str]) -> None:
        for names in self._units.values():
            self.drop(names)
        self._entered.clear()
        self._behind.clear()
        self.drop(resident)
        for layer in layers:
            self.drop(self._of(layer))

    def stopped(self, layer: MoELayer) -> None:
        left = {path for path in self._entered if not f"{layer.name}.".startswith(f"{path}.")}
        for path in left:
            self.drop(self._units[path], hollow)
        self._entered -= left
        self.load(self.targets(layer.name), layer)

    def passed(self, layer: MoELayer) -> None:
        self._behind.add(layer.name)
        self.drop(self._of(layer))
        give_back()

    @contextmanager
    def at_hand(self, layer: MoELayer) -> Iterator[None]:
        if layer.name in self.finished or self._here.issuperset(self.targets(layer.name)):
            yield
            return
        self.load(self.targets(layer.name), layer)
        try:
            yield
        finally:
            self.drop(self._of(layer))
            give_back()

    # ---- one tensor ---------------------------------------------------------------------------------------------

    def load(self, names: Iterable[str], layer: MoELayer | None = None) -> None:
        """Give these tensors their values. Those of an MoE layer must be numbers."""
        names = list(names)
        rooms = {} if layer is None else self._rooms(names)
        for part in dict.fromkeys(self._part[name] for name in names):
            if self._here.issuperset(part.targets):
                continue
            for name, tensor in self._make(part, rooms).items():
                if layer is not None and name not in self._finite:
                    check_finite(tensor, name, layer)
                    self._finite.add(name)
                self._set(name, tensor)
                self._here.add(name)

    def _rooms(self, names: list[str]) -> dict[str, Tensor]:
        """Places for tensors of a layer that are the same but for a number in their names: side by side, so that
        experts with a module each can be looked at together without a copy."""
        kinds: dict[tuple[str, torch.Size], list[str]] = {}
        for name in names:
            kinds.setdefault((re.sub(r"\d+", "0", name), self._empty[name].shape), []).append(name)
        rooms: dict[str, Tensor] = {}
        for (_, shape), alike in kinds.items():
            if len(alike) > 1:
                alike.sort(key=lambda name: [int(digits) for digits in re.findall(r"\d+", name)])
                places = side_by_side(len(alike), shape, self._type_here(alike[0]), self._device)
                rooms |= dict(zip(alike, places, strict=True))
        return rooms

    def _type_here(self, name: str) -> torch.dtype:
        """Of a tensor in memory: 16-bit ones are widened."""
        stored = self._empty[name].dtype
        return self._wide or stored if stored in NARROW else stored

    def drop(self, names: Iterable[str], empty: Callable[[Tensor, torch.device], Tensor] | None = None) -> None:
        """Let go of their values; a tensor that has another shape by now keeps that."""
        for name in names:
            now = self._get(name)
            old = self._empty.get(name)
            if old is None or old.shape != now.shape:
                old = torch.empty(now.shape, dtype=now.dtype, device="meta")
            self._set(name, old if empty is None else empty(old, self._device))
            self._here.discard(name)

    def bytes_of(self, names: Iterable[str], wide: torch.dtype | None) -> int:
        """Of these tensors in memory, 16-bit ones in `wide`."""
        empty = (self._empty[name] for name in names)
        return sum(t.numel() * (wide if wide and t.dtype in NARROW else t.dtype).itemsize for t in empty)

    def spared(self, within: str = "") -> int:
        """Also of layers that have been given another shape: what is stored of a tensor grows with its size."""
        size = {name: tensor.numel() for name, tensor in named_tensors(self.model)}
        spared = 0
        for part in self.parts:
            if targets := [name for name in part.targets if name.startswith(within)]:
                now = sum(size.get(name, 0) for name in targets)
                before = max(sum(self.stored(name).numel() for name in part.targets), 1)
                stored = sum(self.files.raw.size(n) for name in part.names() for n in self.files.stored(name).values())
                spared += (self.bytes_of(part.targets, None) - stored) * now // before
        return spared

    def around(self, layers: list[MoELayer], wide: torch.dtype | None) -> int:
        """What is in memory beside one block during a walk, at the most."""
        units, resident = self._divided(tuple(f"{layer.name}." for layer in layers))
        between, most = 0, 0
        for path, names in units.items():
            between += self.bytes_of(names, wide)
            if any(layer.name.startswith(f"{path}.") for layer in layers):
                most, between = max(most, between), self.bytes_of(names, wide)
        return max(most, between) + self.bytes_of(resident, wide)

    def known(self, name: str) -> bool:
        """Whether a tensor of the model comes from the files."""
        return name in self._part

    def stored(self, name: str) -> Tensor:
        """An empty tensor of the shape and type that it has in the original."""
        return self._empty[name] if name in self._empty else self._get(name)

    def replace(self, files: TensorFiles) -> None:
        """Fill tensors of layers that have been reshaped from other files."""
        before = self.model._weight_conversions
        _, parts = learn(self.model, files, self.load_config, partly=True)
        self.model._weight_conversions = before
        for part in parts:
            for name, tensor in part.convert(self.model, files.read).items():
                stored = self.stored_dtype(name, tensor)
                wide = self._wide or stored if stored in NARROW else stored
                self._set(name, tensor.to(stored).to(self._device, wide))
                self._here.add(name)

    def stored_dtype(self, name: str, tensor: Tensor) -> torch.dtype:
        """Of a tensor of the model, whatever it is widened to at the moment."""
        return self._empty[name].dtype if name in self._empty else tensor.dtype

    def original(self, part: Part) -> dict[str, Tensor]:
        """A part's tensors once more, as they are stored."""
        before, self._wide = self._wide, None
        try:
            return self._make(part)
        finally:
            self._wide = before

    def _make(self, part: Part, rooms: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        stored = {name: self._empty[name] for name in part.targets}
        wide = {name: self._type_here(name) for name in part.targets}
        if len(part.targets) == 1 and part.first == part.targets[0]:
            out = (rooms or {}).get(part.first)
            if out is None:
                out = torch.empty(stored[part.first].shape, dtype=wide[part.first], device=self._device)
            if (places := part.places(out, lambda name: self.files.header[name]["shape"])) is not None:
                for name, place in places:
                    self.files.copy_to(name, place, stored[part.first].dtype)
                return {part.first: out}
        made = part.convert(self.model, lambda name: self.files.read(name).to(stored[part.targets[0]].dtype))
        return {name: tensor.to(self._device, wide[name]) for name, tensor in made.items()}

    def _get(self, name: str) -> Tensor:
        owner, leaf = self._owner(name)
        return (owner._parameters if leaf in owner._parameters else owner._buffers)[leaf]  # type: ignore[return-value]

    def _set(self, name: str, tensor: Tensor) -> None:
        for alias in self._aliases.get(name, [name]):
            owner, leaf = self._owner(alias)
            if leaf not in owner._parameters:
                owner._buffers[leaf] = tensor
                continue
            if not isinstance(tensor, nn.Parameter):
                tensor = nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
            tensor._is_hf_initialized = True  # type: ignore[attr-defined]
            owner._parameters[leaf] = tensor

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        path, _, leaf = name.rpartition(".")
        return self.model.get_submodule(path), leaf

    def _of(self, layer: MoELayer) -> list[str]:
        """All tensors of a block as it is now, but for those that are not from files."""
        return [f"{layer.name}.{name}" for name in layer.block.state_dict() if not name.endswith(KEPT)]


KEPT = ("expert_map",)
"""Small tensors of a finished layer that stay."""


def unit_of(path: str, modules: dict[str, nn.Module]) -> str | None:
    """The module that is entered as a whole: the outermost item of a list of layers, or an embedding."""
    parts = path.split(".")
    for end in range(1, len(parts) + 1):
        if parts[end - 1].isdigit() and isinstance(modules.get(".".join(parts[: end - 1])), nn.ModuleList):
            return ".".join(parts[:end])
    return path if isinstance(modules[path], nn.Embedding) else None


def hollow(empty: Tensor, device: torch.device) -> Tensor:
    """A tensor that says where it is and of which type and shape, as some modules ask before they enter another one.
    It holds one number, and not one that could be calculated with."""
    number = torch.full((), torch.nan if empty.is_floating_point() else 0, dtype=empty.dtype, device=device)
    return number.expand(empty.shape)


def check_finite(tensor: Tensor, name: str, layer: MoELayer) -> None:
    if tensor.is_floating_point():
        for piece in tensor if tensor.dim() > 2 else (tensor,):  # no mask as large as all experts
            if not bool(torch.isfinite(piece).all()):
                raise MoepressError(f"layer {layer.name!r}: {name} holds weights that are not finite")
