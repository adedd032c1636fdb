"""Inner products of the router's logits over tokens: all that a cosine between experts needs, in O(E²) memory."""

from moepress.models.layer import ExpertBank, LayerBatch
from moepress.observe.statistic import STATISTICS, LayerShape, Statistic


@STATISTICS.register("router-gram")
class RouterGram(Statistic):
    """`gram` (E, E): Σ_t H_ti H_tj of the raw logits H."""

    @classmethod
    def sizes(cls, shape: LayerShape) -> dict[str, tuple[int, ...]]:
        return {"gram": (shape.experts, shape.experts)}

    def update(self, batch: LayerBatch, bank: ExpertBank) -> None:
        logits_TE = batch.kept().logits_TE[:, : self.shape.experts].double()
        self.add("gram", logits_TE.T @ logits_TE)
