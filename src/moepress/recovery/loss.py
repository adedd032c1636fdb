"""What the student is asked for, as sums over tokens.

Shape suffixes: B rows, L places, T places that have a label, V vocabulary, K the most probable tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from moepress.data.batches import NO_LABEL

LEAST = 1e-30
"""Probability below which the mass of all other tokens is not told from none."""


@dataclass(frozen=True)
class Likeliest:
    """The softened predictions of a teacher of which only the most probable tokens were kept."""

    ids_TK: Tensor
    logp_TK: Tensor


def at_targets(logits_BLV: Tensor, labels_BL: Tensor) -> Tensor:
    """The fp32 logits (T, V) of the places that have a label: no padding, no prompt."""
    return logits_BLV[labels_BL.to(logits_BLV.device) != NO_LABEL].float()


def likeliest(logits_TV: Tensor, count: int, temperature: float) -> Likeliest:
    top = (logits_TV / temperature).log_softmax(-1).topk(min(count, logits_TV.shape[-1]), dim=-1)
    return Likeliest(top.indices, top.values)


def distillation(student_TV: Tensor, teacher: Tensor | Likeliest, temperature: float) -> Tensor:
    """KL(teacher || student) of the softened predictions. As in the paper it is not scaled by the temperature's square.

    Where only the teacher's most probable tokens are known, all others count as one.
    """
    student_TV = (student_TV / temperature).log_softmax(-1)
    if isinstance(teacher, Tensor):
        teacher_TV = (teacher.to(student_TV.device) / temperature).log_softmax(-1)
        return F.kl_div(student_TV, teacher_TV, reduction="sum", log_target=True)
    known_TK = teacher.logp_TK.to(student_TV.device)
    own_TK = student_TV.gather(1, teacher.ids_TK.to(student_TV.device))
    known_TK, own_TK = with_rest(known_TK), with_rest(own_TK)
    return F.kl_div(own_TK, known_TK, reduction="sum", log_target=True)


def with_rest(logp_TK: Tensor) -> Tensor:
    """The log-probability of all other tokens together, as one more column."""
    rest_T = (1 - logp_TK.exp().sum(-1, keepdim=True)).clamp_min(LEAST).log()
    return torch.cat([logp_TK, rest_T], dim=-1)


def cross_entropy(student_TV: Tensor, labels_BL: Tensor) -> Tensor:
    labels_T = labels_BL[labels_BL != NO_LABEL]
    return F.cross_entropy(student_TV, labels_T.to(student_TV.device), reduction="sum")


def all_finite(tensors: Iterable[Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
