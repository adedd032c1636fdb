"""What the student is asked for.

Shape suffixes: B rows, L places, T places that have a label, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from moepress.data.batches import NO_LABEL


def at_targets(logits_BLV: Tensor, labels_BL: Tensor) -> Tensor:
    """The fp32 logits (T, V) of the places that have a label: no padding, no prompt."""
    return logits_BLV[labels_BL.to(logits_BLV.device) != NO_LABEL].float()


def distillation(student_TV: Tensor, teacher_TV: Tensor, temperature: float) -> Tensor:
    """KL(teacher || student) of the softened predictions, mean per token.

    As in the paper it is not scaled by the temperature's square.
    """
    student, teacher = ((logits / temperature).log_softmax(-1) for logits in (student_TV, teacher_TV))
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True)


def cross_entropy(student_TV: Tensor, labels_BL: Tensor) -> Tensor:
    labels_T = labels_BL[labels_BL != NO_LABEL]
    return F.cross_entropy(student_TV, labels_T.to(student_TV.device))


def all_finite(tensors: Iterable[Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
