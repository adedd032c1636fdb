"""How far a model writes what its original would have written: greedy continuations side by side.

Shape suffixes: B prompts, L tokens of a prompt, N new tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moepress.errors import MoepressError
from moepress.evaluation.precision import evaluating
from moepress.models.walk import CalibrationBatch
from moepress.progress import track


def continuations(
    model: PreTrainedModel,
    batches: list[CalibrationBatch],
    *,
    prompt: int = 64,
    new: int = 32,
    dtype: torch.dtype | None = torch.float32,
) -> list[Tensor]:
    """Greedy continuations (B, new) of the first `prompt` tokens of each row; an encoder–decoder model answers the
    whole row. No token ends a continuation early, so that all are equally long."""
    written: list[Tensor] = []
    device = next(model.parameters()).device
    with evaluating(model, dtype=dtype):
        for batch in track(batches, "generate"):
            ids_BL, kept = batch.inputs["input_ids"], batch.inputs.get("attention_mask")
            mask_BL = torch.ones_like(ids_BL) if kept is None else kept
            if not model.config.is_encoder_decoder:
                # Prompts of one length need no padding on the left.
                whole = mask_BL[:, :prompt].sum(1) == prompt
                ids_BL, mask_BL = ids_BL[whole, :prompt], mask_BL[whole, :prompt]
            if not len(ids_BL):
                continue
            out_BN = model.generate(  # type: ignore[operator]
                input_ids=ids_BL.to(device),
                attention_mask=mask_BL.to(device),
                min_new_tokens=new,
                max_new_tokens=new,
                do_sample=False,
                num_beams=1,
                pad_token_id=0,
            )
            written.append(out_BN[:, -new:].cpu())
    if not written:
        raise MoepressError(f"no text is as long as a prompt of {prompt} tokens: give longer text")
    return written


def common_start(own: list[Tensor], other: list[Tensor]) -> float:
    """The share of tokens before the first one that differs, averaged over continuations."""
    same_BN = torch.cat([(a == b) for a, b in zip(own, other, strict=True)])
    return float(same_BN.long().cumprod(dim=1).double().mean())
