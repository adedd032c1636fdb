"""What plain rounding of the weights costs: the other way to a file of the same size."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moepress.checkpoint.sizes import sizes_of
from moepress.models.find import find_layers

GROUP = 64
"""Weights in a row that share a scale."""
SCALE_BYTES = 2


@torch.no_grad()
def round_weights(model: PreTrainedModel, bits: int) -> int:
    """Round the matrices of linear layers and experts to `bits` bits, to nearest, with a 16-bit scale for each 64
    weights, and return the bytes that the model would take. Embeddings, norms and routers stay as they are. In place:
    the weights keep their type and take rounded values."""
    kept = {id(t) for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module is not None
            for t in module.parameters()}  # fmt: skip
    for layer in find_layers(model):
        names = set(layer.router.tensors)
        kept |= {id(t) for name, t in layer.block.named_parameters() if name in names}
    bytes_ = sizes_of(model).bytes
    for weight in model.parameters():
        if weight.dim() >= 2 and id(weight) not in kept and weight.is_floating_point():
            weight.copy_(rounded(weight, bits))
            groups = -(-weight.shape[-1] // GROUP) * (weight.numel() // weight.shape[-1])
            bytes_ += weight.numel() * bits // 8 + groups * SCALE_BYTES - weight.nbytes
    return bytes_


def rounded(weight: Tensor, bits: int) -> Tensor:
    """To nearest on a symmetric grid, group by group along the last axis."""
    largest = 2 ** (bits - 1) - 1
    size = weight.shape[-1]
    flat = torch.nn.functional.pad(weight.float().reshape(-1, size), (0, -size % GROUP)).unflatten(1, (-1, GROUP))
    scale = (flat.abs().amax(-1, keepdim=True) / largest).half().float().clamp_min(1e-7)
    grid = (flat / scale).round().clamp(-largest, largest) * scale
    return grid.flatten(1)[:, :size].reshape(weight.shape).to(weight.dtype)
