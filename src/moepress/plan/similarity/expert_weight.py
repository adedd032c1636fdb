from dataclasses import dataclass

import torch
from torch import Tensor

from moepress.plan.facts import LayerFacts, cosine
from moepress.plan.similarity.base import SIMILARITIES, Similarity


@SIMILARITIES.register("expert-weight")
@dataclass(frozen=True)
class ExpertWeight(Similarity):
    """Cosine of two experts' weights, all matrices and biases as one vector. Meaningful on aligned experts only:
    use it with `align.reference: first`."""

    paper = "MC-SMoE, https://arxiv.org/abs/2310.01334"

    def matrix(self, facts: LayerFacts) -> Tensor:
        gram_EE = torch.zeros(facts.experts, facts.experts, dtype=torch.float64)
        for tensor in facts.read_bank().tensors().values():
            flat = tensor.reshape(facts.experts, -1).float()
            gram_EE += (flat @ flat.T).double().cpu()
        return cosine(gram_EE)
