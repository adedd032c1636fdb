"""Pruning S without training: gradients on calibration text, and no optimiser step.

Shape suffixes: B rows, L places, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moepress.data.batches import NO_LABEL, next_token_labels
from moepress.decompose.importance import Importance, factored_matrices, strongest_slices
from moepress.errors import MoepressError
from moepress.models.implementation import quickest_experts
from moepress.models.parameters import only_training
from moepress.models.visit import CalibrationBatch
from moepress.models.walk import without_cache
from moepress.progress import track


def one_shot(
    model: nn.Module, batches: list[CalibrationBatch], share: float, importance: Importance
) -> dict[str, Tensor]:
    """By matrix, which columns (rows) of S stay. The loss is that of predicting the text, or the labels of a task."""
    matrices = factored_matrices(model)
    scores: dict[str, Tensor] = {}
    device = next(model.parameters()).device
    packed = [matrix.packed_Px for matrix in matrices.values()]
    with only_training(model, packed), without_cache(model), quickest_experts(model, device):
        for step, batch in enumerate(track(batches, "gradients"), start=1):
            inputs = {name: tensor.to(device) for name, tensor in batch.inputs.items() if name != "labels"}
            with torch.enable_grad():
                logits_BLV = model(**inputs).logits
                labels_BL = next_token_labels(batch).to(logits_BLV.device)
                loss = F.cross_entropy(logits_BLV.float().flatten(0, 1), labels_BL.flatten(), ignore_index=NO_LABEL)
                if not bool(torch.isfinite(loss)):
                    raise MoepressError(f"the loss on calibration batch {step} is {float(loss)}")
                loss.backward()
            for name, matrix in matrices.items():
                scores[name] = importance.smoothed(scores.get(name), importance.scores(matrix), step)
                matrix.packed_Px.grad = None
    lengths = {name: matrix.packed_Px.shape[1] for name, matrix in matrices.items()}
    return strongest_slices(scores, lengths, share)
