"""A pass with gradients: of the loss on calibration text, with respect to the weights of the experts.

The loss of a sample is the mean cross-entropy of its labels (the next tokens of plain text, the answers of a task;
padding and prompts of tasks have none). Samples go through one at a time, since some statistics are about the gradient
of a single sample; all samples of a domain count the same, and so do all domains. Beside the model this takes memory
for one more copy of all experts (the gradients of a sample) and for what is added up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from moepress.data.batches import NO_LABEL, next_token_labels
from moepress.errors import MoepressError, UnsupportedModel
from moepress.models.implementation import quickest_experts
from moepress.models.layer import ExpertBank, LayerBatch, MoELayer
from moepress.models.parameters import expert_parameters, gradient_bank, only_training
from moepress.models.visit import CalibrationBatch
from moepress.models.walk import without_cache
from moepress.observe.statistic import STATISTICS, Statistic
from moepress.progress import track


class GradientSum(ABC):
    """What is added up over the gradients of all samples, for one layer."""

    @abstractmethod
    def add_gradient(self, gradient: ExpertBank, share: float) -> None:
        """One sample's gradients; the shares of all samples add up to 1."""


class GradientStatistic(Statistic, GradientSum):
    """A statistic that is made of gradients. While it is gathered it may be as large as the experts; what it keeps is
    small, and of one run: two runs do not add up."""

    def update(self, batch: LayerBatch, bank: ExpertBank) -> None:
        raise TypeError("gradients do not come from what a layer is called with: see `Statistics.gather_gradients`")

    @abstractmethod
    def finish(self) -> None:
        """All samples have been seen: make the sums."""


def from_gradients(names: Iterable[str]) -> list[str]:
    """Those of some statistics that need a pass with gradients."""
    return [name for name in names if issubclass(STATISTICS.get(name), GradientStatistic)]


class Fisher(GradientSum):
    """The diagonal empirical Fisher information: the mean squared gradient. As large as the experts in float32."""

    def __init__(self) -> None:
        self.bank: ExpertBank | None = None

    def add_gradient(self, gradient: ExpertBank, share: float) -> None:
        squared = gradient.map(lambda _, tensor: tensor.float().square() * share)
        self.bank = squared if self.bank is None else added(self.bank, squared)


def added(total: ExpertBank, more: ExpertBank) -> ExpertBank:
    """In place."""
    tensors = more.tensors()
    return total.map(lambda name, tensor: tensor.add_(tensors[name]))


def gather_gradients(
    model: torch.nn.Module,
    layers: list[MoELayer],
    batches: list[CalibrationBatch],
    sums: Mapping[str, Sequence[GradientSum]],
) -> None:
    """Show every sample's gradients to the sums of each layer, which are given by its name."""
    chosen = [layer for layer in layers if sums.get(layer.name)]
    if not chosen:
        return
    parameters = {layer.name: expert_parameters(layer) for layer in chosen}
    device = layers[0].weights.device
    shares = shares_of(batches)
    trained = [parameter for owned in parameters.values() for parameter in owned]
    # `only_training` also switches off dropout and router noise.
    with only_training(model, trained), without_cache(model), quickest_experts(model, device), torch.enable_grad():
        for batch in track(batches, "gradients"):
            for inputs, labels_L in samples_of(batch):
                loss = mean_loss(model, inputs, labels_L, device)
                loss.backward()
                for layer in chosen:
                    gradient = gradient_bank(layer, parameters[layer.name])
                    for total in sums[layer.name]:
                        total.add_gradient(gradient, shares[batch.domain])
                for parameter in trained:
                    parameter.grad = None


def shares_of(batches: list[CalibrationBatch]) -> dict[str, float]:
    """What a sample of each domain counts."""
    samples = Counter(batch.domain for batch in batches for _ in samples_of(batch))
    if not samples:
        raise MoepressError("the calibration text has no token to predict, so that there is no loss to differentiate")
    return {domain: 1 / (count * len(samples)) for domain, count in samples.items()}


def samples_of(batch: CalibrationBatch) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """Arguments of a forward pass for each sample that is asked for something, and its labels."""
    for i, labels_L in enumerate(next_token_labels(batch)):
        if bool((labels_L != NO_LABEL).any()):
            yield {name: tensor[i : i + 1] for name, tensor in batch.inputs.items() if name != "labels"}, labels_L


def mean_loss(model: torch.nn.Module, inputs: dict[str, Tensor], labels_L: Tensor, device: torch.device) -> Tensor:
    logits_LV = model(**{name: tensor.to(device) for name, tensor in inputs.items()}).logits[0]
    wide_LV = logits_LV.to(torch.promote_types(logits_LV.dtype, torch.float32))
    loss = torch.nn.functional.cross_entropy(wide_LV, labels_L.to(wide_LV.device), ignore_index=NO_LABEL)
    if not bool(torch.isfinite(loss)):
        raise MoepressError("the loss on the calibration text is not finite; check the model's weights")
    return loss


def check_differentiable(model: torch.nn.Module, layers: list[MoELayer]) -> None:
    """Refuse now what `gather_gradients` could not do."""
    if not layers[0].weights.resident:
        raise MoepressError("gradients need the whole model in memory: they cannot be had from weights that are paged")
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None:
        raise UnsupportedModel(
            f"{type(model).__name__} does not predict tokens, so that there is no loss to take gradients of: "
            "use a method that needs none"
        )
    for layer in layers:
        expert_parameters(layer)
