"""Inner products of the experts' gradients."""

from moepress.models.layer import ExpertBank
from moepress.observe.gradients import GradientStatistic, added
from moepress.observe.statistic import STATISTICS, LayerShape


@STATISTICS.register("gradient-gram")
class GradientGram(GradientStatistic):
    """`gram` (E, E): ⟨G_i, G_j⟩ of the mean gradients G of the loss with respect to each expert's weights, all tensors
    as one vector, in the unit order that the experts have then."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape)
        self.total: ExpertBank | None = None

    @classmethod
    def sizes(cls, shape: LayerShape) -> dict[str, tuple[int, ...]]:
        return {"gram": (shape.experts, shape.experts)}

    def add_gradient(self, gradient: ExpertBank, share: float) -> None:
        scaled = gradient.map(lambda _, tensor: tensor.float() * share)
        self.total = scaled if self.total is None else added(self.total, scaled)

    def finish(self) -> None:
        assert self.total is not None  # there is a sample at least
        for tensor in self.total.tensors().values():
            flat = tensor.flatten(1).double()
            self.add("gram", flat @ flat.T)
        self.total = None
