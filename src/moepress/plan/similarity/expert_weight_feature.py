from dataclasses import dataclass

import torch
from torch import Tensor

from moepress.plan.facts import LayerFacts, cosine
from moepress.plan.similarity.base import SIMILARITIES, Similarity


@SIMILARITIES.register("expert-weight-feature")
@dataclass(frozen=True)
class ExpertWeightFeature(Similarity):
    """Cosine of two experts' input matrices, each input weighted by its norm over the expert's tokens (as Wanda weighs
    weights for pruning). Meaningful on aligned experts only: use it with `align.reference: first`."""

    paper = "MC-SMoE, https://arxiv.org/abs/2310.01334"
    needs = ("features",)

    def matrix(self, facts: LayerFacts) -> Tensor:
        norm_ED = facts.statistics["features"]["square"].sqrt()
        bank = facts.read_bank()
        gram_EE = torch.zeros(facts.experts, facts.experts, dtype=torch.float64)
        for weight_EFD in (bank.up_EFD, bank.gate_EFD):
            if weight_EFD is not None:
                weighed = weight_EFD.float() * norm_ED[:, None, :].to(weight_EFD.device, torch.float32)
                flat = weighed.reshape(facts.experts, -1)
                gram_EE += (flat @ flat.T).double().cpu()
        return cosine(gram_EE)
