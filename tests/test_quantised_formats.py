"""The arithmetic of quantised formats, against libraries that have it and against what rounding can do at its best."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Quantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from moepress.checkpoint.quantised import storage_of
from moepress.checkpoint.quantised.mxfp4 import NUMBERS

from .quantised import CONFIGS, INT4, TYPES, unpacked

SHAPES = {"fp8": (24, 40), "ragged": (27, 41), "powers": (16, 40), "mxfp4": (64, 5), "int4": (6, 24)}
seeds = st.integers(0, 2**31)
scales = st.sampled_from([1e-6, 1e-2, 1.0, 300.0])


def random(kind: str, seed: int, scale: float) -> Tensor:
    """With a block of zeros, numbers of many sizes, and one that sticks out."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(SHAPES[kind], generator=generator) * torch.randn(SHAPES[kind], generator=generator).exp()
    values[:8, :8] = 0
    values[-1, -1] = 9
    return values * scale


def packing(kind: str) -> tuple[Any, dict[str, torch.dtype]]:
    storage = storage_of(CONFIGS[kind], "x")
    return storage, TYPES.get(CONFIGS[kind]["quant_method"], {})


@pytest.mark.parametrize("kind", SHAPES)
@given(seed=seeds, scale=scales)
@settings(max_examples=20, deadline=None)
def test_rounding_is_to_the_nearest(kind: str, seed: int, scale: float) -> None:
    storage, types = packing(kind)
    values = random(kind, seed, scale)
    stored = storage.pack(values, types)
    back = unpacked(storage, stored, values.shape)
    assert bool(torch.isfinite(back).all()) and not back[:8, :8].any()
    group = values.T.reshape(-1, 32) if kind == "mxfp4" else values
    error = ((back - values).T.reshape(-1, 32) if kind == "mxfp4" else back - values).abs()
    if kind == "mxfp4":  # half of the widest step is 1 of 6, cut off are at most 6 to 8: a quarter of the largest
        assert bool((error <= group.abs().amax(1, keepdim=True) * 0.251).all())
    elif kind == "int4":  # half a step of one of 15, a whole one at the end; scales are rounded to bf16
        largest = values.unflatten(1, (-1, 8)).abs().amax(-1).repeat_interleave(8, 1)
        assert bool((error <= largest / 7.5 * 0.52 + largest * 2**-8).all())
    else:  # three bits behind the leading one; below the smallest normal number 2^-6, half of 2^-9 of the scale
        assert bool((error <= values.abs() * 2**-4 * 1.001 + values.abs().max() * 2 / 448 * 2**-10).all())


@pytest.mark.parametrize("kind", SHAPES)
def test_in_pieces_it_is_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, types = packing(kind)
    values = random(kind, 0, 1.0)
    whole = storage.pack(values, types)
    back = unpacked(storage, whole, values.shape)
    for module in ("storage", "fp8", "mxfp4", "integers"):
        for size in ("CHUNK", "PIECE"):
            monkeypatch.setattr(f"moepress.checkpoint.quantised.{module}.{size}", 64, raising=False)
    pieces = storage.pack(values, types)
    assert whole.keys() == pieces.keys()
    assert all(torch.equal(part.view(torch.uint8), pieces[role].view(torch.uint8)) for role, part in whole.items())
    assert len(list(storage.unpack(whole))) > 1 and torch.equal(unpacked(storage, whole, values.shape), back)


@given(seed=seeds, scale=scales)
@settings(max_examples=20, deadline=None)
def test_what_mxfp4_can_store_is_stored_exactly(seed: int, scale: float) -> None:
    storage, types = packing("mxfp4")
    once = unpacked(storage, storage.pack(random("mxfp4", seed, scale), types), SHAPES["mxfp4"])
    assert torch.equal(unpacked(storage, storage.pack(once, types), SHAPES["mxfp4"]), once)


@pytest.mark.parametrize("kind", ["fp8", "powers"])
@given(seed=seeds, scale=scales)
@settings(max_examples=20, deadline=None)
def test_fp8_is_that_of_transformers(kind: str, seed: int, scale: float) -> None:
    storage, types = packing(kind)
    values = random(kind, seed, scale)
    given = {"weight_block_size": (8, 8), "scale_fmt": CONFIGS[kind].get("scale_fmt", "float")}
    quantizer = FineGrainedFP8HfQuantizer(transformers.FineGrainedFP8Config(**given))
    theirs = Fp8Quantize(quantizer).convert({"x.weight": values})
    ours = storage.pack(values, types)
    back = unpacked(storage, ours, values.shape)
    their_values = {"values": theirs["x.weight"], "scales": theirs["x.weight_scale_inv"]}
    expected = unpacked(storage, their_values, values.shape)
    assert torch.equal(back, expected) and torch.equal(ours["scales"], theirs["x.weight_scale_inv"].float())


def test_mxfp4_is_unpacked_as_transformers_unpacks_it() -> None:
    storage, _ = packing("mxfp4")
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 5, 2, 16), generator=generator).to(torch.uint8)
    exponents = torch.randint(100, 140, (3, 5, 2), generator=generator).to(torch.uint8)
    theirs = convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32)
    for row in range(3):
        assert torch.equal(unpacked(storage, {"values": blocks[row], "scales": exponents[row]}, (64, 5)), theirs[row])


def test_mxfp4_chooses_the_better_of_two_exponents() -> None:
    """By trying all sixteen numbers under all exponents near the largest number's."""
    storage, types = packing("mxfp4")
    values = random("mxfp4", 3, 1.0)
    back = unpacked(storage, storage.pack(values, types), SHAPES["mxfp4"])

    def errors(found: Tensor) -> Tensor:
        return (found - values).T.reshape(-1, 32).square().sum(1)

    best = torch.full_like(errors(back), torch.inf)
    for exponent in range(-12, 6):
        numbers = NUMBERS * 2.0**exponent
        nearest = numbers[(values[..., None] - numbers).abs().argmin(-1)]
        best = torch.minimum(best, errors(nearest))
    assert torch.allclose(errors(back), best, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("bits, strategy", [(4, "group"), (4, "channel"), (8, "group")])
def test_integers_are_those_of_compressed_tensors(bits: int, strategy: str) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    weights = INT4 | {"num_bits": bits, "strategy": strategy}
    weights |= {"group_size": None} if strategy == "channel" else {}
    storage = storage_of(CONFIGS["int4"] | {"config_groups": {"g": {"weights": weights}}}, "x")
    values = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    ours = storage.pack(values, {"scales": torch.float32, "shape": torch.int64})
    arguments = quantization.QuantizationArgs(**weights)
    groups = values.unflatten(1, (-1, 8)) if strategy == "group" else values[:, None]
    theirs, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments)
    assert torch.allclose(ours["scales"], theirs, rtol=1e-6)
    numbers = quantize(values, ours["scales"], zero, arguments, dtype=torch.int8)
    assert torch.equal(helpers.pack_to_int32(numbers, bits), ours["values"])
    assert torch.equal(helpers.unpack_from_int32(ours["values"], bits, torch.Size(values.shape)), numbers)
