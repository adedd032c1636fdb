"""Expert matrices as W = UV + S, where S holds a few whole columns (or rows) of each expert's matrix and no others.

Every expert may keep another number of them, so the stored tensors are ragged, with offsets. What is multiplied
together lies together: in the form by columns U and the columns of S are the packed rows that `[Vx; x[columns]]` meets
in one product; in the form by rows V and the rows of S are the packed rows that x meets. That S has all columns is
nothing special: it is how a model is trained before it is pruned.

Shape suffixes: E experts, O output width, I input width, R rank, N kept columns (rows) of all experts together,
P = E * R + N packed rows, n tokens in the order of their experts, C columns padded for a whole layer, x width of a
factor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from moepress.models.layer import Activation, Factors
from moepress.runtime.grouped import grouped_product, padded, suits_grouped
from moepress.runtime.linear import linear
from moepress.runtime.serve import Groups

MATRICES = ("gate", "up", "down")


class FactoredMatrix(nn.Module, ABC):
    """One matrix of every expert of a layer."""

    along: ClassVar[str]
    """What S keeps: `columns` or `rows`."""
    thin: ClassVar[str]
    """Name of the (E, R, ·) factor that S is not packed with."""
    packed: ClassVar[str]
    """Name of the (P, ·) rows: expert after expert, first its R rows of the other factor, then those of S."""

    def __init__(self, experts: int, out: int, into: int, rank: int, kept: int, like: Tensor) -> None:
        super().__init__()
        self.rank = rank
        thin, packed = self._widths(out, into)

        def parameter(*shape: int) -> nn.Parameter:
            empty = torch.empty(*shape, dtype=like.dtype, device=like.device)
            return nn.Parameter(empty, requires_grad=like.requires_grad)

        self.register_parameter(self.thin, parameter(experts, rank, thin))
        self.register_parameter(self.packed, parameter(experts * rank + kept, packed))
        self.index: Tensor
        self.offsets: Tensor
        self.register_buffer("index", torch.zeros(kept, dtype=torch.int32, device=like.device))
        self.register_buffer("offsets", torch.zeros(experts + 1, dtype=torch.int32, device=like.device))
        self._kept: dict[str, tuple[list[Tensor], list[int], Any]] = {}

    @staticmethod
    @abstractmethod
    def _widths(out: int, into: int) -> tuple[int, int]:
        """Width of the thin factor and of the packed rows."""

    @property
    @abstractmethod
    def choices(self) -> int:
        """How many columns (rows) one matrix has."""

    @abstractmethod
    def one(self, e: int, x_nI: Tensor) -> Tensor:
        """Expert `e`'s matrix times some tokens."""

    @abstractmethod
    def grouped(self, x_nI: Tensor, groups: Groups) -> Tensor:
        """All experts in grouped products; tokens in the order of their experts."""

    @abstractmethod
    def dense_one(self, e: int) -> Tensor:
        """Expert `e`'s matrix multiplied out: (O, I)."""

    @property
    @abstractmethod
    def in_width(self) -> int:
        """I"""

    def dense(self) -> Tensor:
        """UV + S, multiplied out: (E, O, I)."""
        if self.index.is_meta:  # only the shape is known
            return self.packed_Px.new_empty(self.experts, self.out_width, self.in_width)
        return torch.stack([self.dense_one(e) for e in range(self.experts)])

    # ---- what is stored -----------------------------------------------------------------------------------------

    @property
    def thin_ERx(self) -> Tensor:
        return getattr(self, self.thin)

    @property
    def packed_Px(self) -> Tensor:
        return getattr(self, self.packed)

    @property
    def experts(self) -> int:
        return self.thin_ERx.shape[0]

    @property
    @abstractmethod
    def out_width(self) -> int:
        """O"""

    def bounds(self) -> list[int]:
        """The offsets as numbers, fetched from their device once."""
        return self._once("bounds", self.offsets.tolist)

    def even(self) -> tuple[Tensor, Tensor]:
        """The packed rows as a rectangle (E, R + C, x), filled up with zeros, and which columns (rows) those of S are
        (E, C)."""
        rows_EC, index_EC = self._once("even", lambda: padded(self.bounds(), self.rank, self.index))
        if rows_EC is None:
            return self.packed_Px.view(self.experts, -1, self.packed_Px.shape[1]), index_EC
        spare_1x = self.packed_Px.new_zeros(1, self.packed_Px.shape[1])
        return torch.cat([self.packed_Px, spare_1x])[rows_EC], index_EC

    def _once(self, what: str, make: Callable[[], Any]) -> Any:
        """Something that follows from offsets and index alone, made again only when they have changed."""
        tensors = [self.offsets, self.index]
        versions = [0 if t.is_inference() else t._version for t in tensors]
        kept = self._kept.get(what)
        if kept is None or kept[1] != versions or any(a is not b for a, b in zip(kept[0], tensors, strict=True)):
            self._kept[what] = kept = (tensors, versions, make())
        return kept[2]

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_kept": {}}

    def packed_of(self, e: int) -> slice:
        bounds = self.bounds()
        return slice(e * self.rank + bounds[e], (e + 1) * self.rank + bounds[e + 1])

    def kept_of(self, e: int) -> Tensor:
        bounds = self.bounds()
        return self.index[bounds[e] : bounds[e + 1]]

    def kept_counts(self) -> list[int]:
        """How many columns (rows) S keeps, by expert."""
        bounds = self.bounds()
        return [bounds[e + 1] - bounds[e] for e in range(self.experts)]

    def sparse_rows(self) -> Tensor:
        """Where the rows of S are among the packed ones: (N,)."""
        counts_E = self.offsets.diff().long()
        before_N = torch.arange(self.experts, device=counts_E.device).repeat_interleave(counts_E)
        return torch.arange(len(self.index), device=counts_E.device) + (before_N + 1) * self.rank

    def fill(self, thin_ERx: Tensor, other_ERx: Tensor, sparse: list[Tensor], kept: list[Tensor]) -> None:
        """Write the factors, and of each expert the rows of S that are kept and which they are."""
        with torch.no_grad():
            self.thin_ERx.copy_(thin_ERx)
            rows = [part for pair in zip(other_ERx, sparse, strict=True) for part in pair]
            self.packed_Px.copy_(torch.cat(rows))
            self.index.copy_(torch.cat(kept))
            self.offsets.copy_(torch.tensor([0, *(len(each) for each in kept)]).cumsum(0))


class ColumnFactors(FactoredMatrix):
    """S keeps columns: parts of the input that go past the low rank."""

    along, thin, packed = "columns", "v", "us"

    @staticmethod
    def _widths(out: int, into: int) -> tuple[int, int]:
        return into, out

    @property
    def out_width(self) -> int:
        return self.packed_Px.shape[1]

    @property
    def in_width(self) -> int:
        return self.thin_ERx.shape[2]

    @property
    def choices(self) -> int:
        return self.in_width

    def one(self, e: int, x_nI: Tensor) -> Tensor:
        low_nR = linear(x_nI, self.thin_ERx[e])
        columns = x_nI.index_select(1, self.kept_of(e))
        return linear(torch.cat([low_nR, columns], dim=1), self.packed_Px[self.packed_of(e)].T)

    def grouped(self, x_nI: Tensor, groups: Groups) -> Tensor:
        packed_ECO, index_EC = self.even()
        low_nR = grouped_product(x_nI, self.thin_ERx.transpose(1, 2), groups.ends_E)
        columns = x_nI.gather(1, index_EC[groups.expert_n])
        return grouped_product(torch.cat([low_nR, columns.to(low_nR.dtype)], dim=1), packed_ECO, groups.ends_E)

    def dense_one(self, e: int) -> Tensor:
        packed = self.packed_Px[self.packed_of(e)]
        whole = packed[: self.rank].T @ self.thin_ERx[e]
        return whole.index_add(1, self.kept_of(e), packed[self.rank :].T)


class RowFactors(FactoredMatrix):
    """S keeps rows: parts of the output that the low rank alone does not reach."""

    along, thin, packed = "rows", "u", "vs"

    @staticmethod
    def _widths(out: int, into: int) -> tuple[int, int]:
        return out, into

    @property
    def out_width(self) -> int:
        return self.thin_ERx.shape[2]

    @property
    def in_width(self) -> int:
        return self.packed_Px.shape[1]

    @property
    def choices(self) -> int:
        return self.out_width

    def one(self, e: int, x_nI: Tensor) -> Tensor:
        both = linear(x_nI, self.packed_Px[self.packed_of(e)])
        low_nO = linear(both[:, : self.rank].contiguous(), self.thin_ERx[e].T)
        return low_nO.index_add(1, self.kept_of(e), both[:, self.rank :])

    def grouped(self, x_nI: Tensor, groups: Groups) -> Tensor:
        packed_ECI, index_EC = self.even()
        both = grouped_product(x_nI, packed_ECI.transpose(1, 2), groups.ends_E)
        low_nO = grouped_product(both[:, : self.rank].contiguous(), self.thin_ERx, groups.ends_E)
        # what is padded adds zeros to row 0
        return low_nO.scatter_add(1, index_EC[groups.expert_n], both[:, self.rank :])

    def dense_one(self, e: int) -> Tensor:
        packed = self.packed_Px[self.packed_of(e)]
        whole = self.thin_ERx[e].T @ packed[: self.rank]
        return whole.index_add(0, self.kept_of(e), packed[self.rank :])


FORMS: dict[str, type[FactoredMatrix]] = {form.along: form for form in (ColumnFactors, RowFactors)}


class ExpertFactors(nn.Module):
    """All experts of a layer: their matrices factored, their biases as they were."""

    def __init__(self, experts: int, width: int, hidden: int, shape: Factors, biases: list[str], like: Tensor) -> None:
        super().__init__()
        form = FORMS[shape.along]
        for name in MATRICES:
            kept = getattr(shape, name)
            if kept is None:
                self.register_module(name, None)
                continue
            out, into = (width, hidden) if name == "down" else (hidden, width)
            self.register_module(name, form(experts, out, into, shape.rank, kept, like))
        for name in MATRICES:
            bias = None
            if name in biases:
                size = width if name == "down" else hidden
                empty = torch.empty(experts, size, dtype=like.dtype, device=like.device)
                bias = nn.Parameter(empty, requires_grad=like.requires_grad)
            self.register_parameter(f"{name}_bias", bias)

    @property
    def experts(self) -> int:
        return self.matrix("down").experts

    @property
    def hidden_units(self) -> int:
        return self.matrix("up").out_width

    def matrix(self, name: str) -> FactoredMatrix:
        matrix = getattr(self, name)
        assert isinstance(matrix, FactoredMatrix)
        return matrix

    def matrices(self) -> dict[str, FactoredMatrix]:
        return {name: self.matrix(name) for name in MATRICES if getattr(self, name) is not None}

    def shape(self) -> Factors:
        """What describes this layer in config.json."""
        made = self.matrices()
        counts = {name: len(matrix.index) for name, matrix in made.items()}
        return Factors(made["down"].rank, made["down"].along, counts["up"], counts["down"], counts.get("gate"))

    def dense(self) -> dict[str, Tensor]:
        """The experts multiplied out, by the names of an `ExpertBank`."""
        axes = {"gate": "EFD", "up": "EFD", "down": "EDF"}
        made = {f"{name}_{axes[name]}": matrix.dense() for name, matrix in self.matrices().items()}
        for name in MATRICES:
            bias = getattr(self, f"{name}_bias")
            if bias is not None:
                made[f"{name}_bias_{'ED' if name == 'down' else 'EF'}"] = bias
        return made

    def one(self, e: int, x_nD: Tensor, activate: Activation) -> Tensor:
        """Expert `e` on some tokens."""

        def affine(name: str, x_nI: Tensor) -> Tensor:
            y_nO, bias = self.matrix(name).one(e, self._typed(x_nI)), getattr(self, f"{name}_bias")
            return y_nO if bias is None else y_nO + bias[e]

        return self._through(x_nD, affine, activate)

    def together(self, x_nD: Tensor, groups: Groups, activate: Activation) -> Tensor:
        """All experts, each on its rows."""

        def affine(name: str, x_nI: Tensor) -> Tensor:
            y_nO, bias = self.matrix(name).grouped(self._typed(x_nI), groups), getattr(self, f"{name}_bias")
            return y_nO if bias is None else groups.quiet(y_nO + bias[groups.expert_n])

        return self._through(x_nD, affine, activate)

    def forward(self, x_nD: Tensor, counts: list[int], activate: Activation) -> Tensor:
        """Tokens in the order of their experts, of which expert e has `counts[e]`."""
        if x_nD.is_cuda and len(x_nD) and suits_grouped(self.sizes):
            return self.together(x_nD, Groups.of(counts, x_nD.device), activate)
        parts = [self.one(e, part, activate) for e, part in enumerate(x_nD.split(counts)) if len(part)]
        return torch.cat(parts) if parts else x_nD.new_empty(0, self.matrix("down").out_width)

    def _through(self, x_nD: Tensor, affine: Callable[[str, Tensor], Tensor], activate: Activation) -> Tensor:
        gate_nF = None if self.gate is None else affine("gate", x_nD)
        return affine("down", activate(gate_nF, affine("up", x_nD)))

    def _typed(self, x_nI: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x_nI.device.type):
            return x_nI
        return x_nI.to(self.matrix("down").thin_ERx.dtype)

    @property
    def sizes(self) -> tuple[int, ...]:
        down = self.matrix("down")
        return down.in_width, down.out_width, down.rank
