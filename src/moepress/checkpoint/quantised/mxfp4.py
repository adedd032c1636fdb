"""MXFP4, as gpt-oss ships its experts: four bits a number, and one power of two for every 32 of them.

`experts.down_proj_blocks` (E, rows, groups, 16) holds two numbers a byte, the first in the lower half;
`experts.down_proj_scales` (E, rows, groups) the exponents plus 127. The model has the matrices the other way round,
(E, columns, rows). The quantiser that transformers uses is a GPU kernel from the Hub.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from moepress.checkpoint.headers import Header
from moepress.checkpoint.quantised.storage import CHUNK, Packed, Storage, does_not_fit, tensor_of

GROUP = 32
BIAS = 127
POSITIVE = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
NUMBERS = torch.cat([POSITIVE, -POSITIVE])
HALFWAY = (POSITIVE[1:] + POSITIVE[:-1]) / 2
BLOCKS, SCALES = "_blocks", "_scales"


class Mxfp4(Storage):
    description = "MXFP4"
    rows: ClassVar[bool] = True

    def names(self, name: str) -> dict[str, str]:
        return {"values": name + BLOCKS, "scales": name + SCALES}

    def find(self, header: Header) -> dict[str, Packed]:
        found = {}
        for stored in header:
            name = stored.removesuffix(BLOCKS)
            if name == stored:
                continue
            names = self.names(name)
            values, scales = header[stored], tensor_of(header, names["scales"], stored)
            shape = values["shape"]
            fits = len(shape) == 4 and shape[3] * 2 == GROUP and shape[:3] == scales["shape"]
            if not fits or {values["dtype"], scales["dtype"]} != {"U8"}:
                raise does_not_fit(stored, shape, names["scales"], scales["shape"])
            found[name] = Packed(name, (shape[0], shape[2] * GROUP, shape[1]), names)
        return found

    def unpack(self, stored: Mapping[str, Tensor]) -> Iterator[tuple[Any, Tensor]]:
        """Of one expert."""
        bytes_RGb, scales_RG = stored["values"], stored["scales"]
        step = max(CHUNK // max(scales_RG.shape[1] * GROUP, 1), 1)
        for start in range(0, len(bytes_RGb), step):
            some = slice(start, start + step)
            halves = (bytes_RGb[some] & 15, bytes_RGb[some] >> 4)
            numbers_RGn = torch.stack([NUMBERS[half.int()] for half in halves], dim=-1).flatten(-2)
            values_RC = torch.ldexp(numbers_RGn, scales_RG[some, :, None].int() - BIAS).flatten(1)
            yield (slice(None), some), values_RC.T

    def pack(self, values: Tensor, like: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        """Of one expert."""
        return super().pack(values.T, like)

    def pack_rows(self, values: Tensor, like: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        """A group gets the exponent with which its largest number fits, or the one below, which cuts that off and has
        finer steps for the others: whichever leaves the smaller squared error."""
        x_RGn = values.unflatten(1, (-1, GROUP))
        largest_RG = x_RGn.abs().amax(-1)
        fits_RG = torch.log2(largest_RG.clamp_min(2.0**-120) / POSITIVE[-1]).ceil().int().clamp_(1 - BIAS, BIAS)
        tried = [self._rounded(x_RGn, exponent_RG) for exponent_RG in (fits_RG, fits_RG - 1)]
        finer_RG = tried[1][1] < tried[0][1]
        code_RGn = torch.where(finer_RG[..., None], tried[1][0], tried[0][0])
        scales_RG = torch.where(finer_RG, fits_RG - 1, fits_RG) + BIAS
        packed_RGb = code_RGn[..., ::2] | code_RGn[..., 1::2] << 4
        return {"values": packed_RGb.to(torch.uint8).contiguous(), "scales": scales_RG.to(torch.uint8)}

    def _rounded(self, x_RGn: Tensor, exponent_RG: Tensor) -> tuple[Tensor, Tensor]:
        """Four-bit codes, and each group's squared error. What lies in the middle goes to the even code."""
        scaled_RGn = torch.ldexp(x_RGn, -exponent_RG[..., None])
        size_RGn = scaled_RGn.abs().contiguous()
        code_RGn = torch.bucketize(size_RGn, HALFWAY)
        middle = (size_RGn == HALFWAY[code_RGn.clamp_max(len(HALFWAY) - 1)]) & (code_RGn % 2 == 1)
        code_RGn = code_RGn + middle + 8 * (scaled_RGn < 0)
        rounded_RGn = torch.ldexp(NUMBERS[code_RGn], exponent_RG[..., None])
        return code_RGn, (rounded_RGn - x_RGn).square().sum(-1)
