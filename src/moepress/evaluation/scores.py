"""What an evaluation says: sums over tokens, and the means that follow from them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass
class TextScore:
    """How well a model predicts some text. Every token counts the same, whatever its domain."""

    tokens: int = 0
    nats: float = 0.0
    """Negative log-likelihood of all tokens together."""
    domains: dict[str, TextScore] = field(default_factory=dict)

    def add(self, other: TextScore) -> None:
        self.tokens += other.tokens
        self.nats += other.nats

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """The exponential of the mean loss: the geometric mean of 1 / probability over all tokens."""
        return math.exp(min(self.loss, 700.0))

    def to_dict(self) -> dict[str, Any]:
        return _with_domains(self, {"tokens": self.tokens, "loss": self.loss, "perplexity": self.perplexity})


@dataclass
class Comparison:
    """A model beside its original on the same text."""

    model: TextScore = field(default_factory=TextScore)
    original: TextScore = field(default_factory=TextScore)
    kl_nats: float = 0.0
    """KL(original || model), summed over tokens."""
    agreeing: int = 0
    domains: dict[str, Comparison] = field(default_factory=dict)

    def add(self, other: Comparison) -> None:
        self.model.add(other.model)
        self.original.add(other.original)
        self.kl_nats += other.kl_nats
        self.agreeing += other.agreeing

    @property
    def tokens(self) -> int:
        return self.model.tokens

    @property
    def kl(self) -> float:
        """Mean KL(original || model) in nats per token."""
        return self.kl_nats / self.tokens if self.tokens else math.nan

    @property
    def agreement(self) -> float:
        """Share of tokens for which both models have the same first choice."""
        return self.agreeing / self.tokens if self.tokens else math.nan

    def to_dict(self) -> dict[str, Any]:
        own = {
            "tokens": self.tokens,
            "kl": self.kl,
            "agreement": self.agreement,
            "perplexity": self.model.perplexity,
            "original_perplexity": self.original.perplexity,
        }
        return _with_domains(self, own)


@dataclass(frozen=True)
class TaskScore:
    """A model on a labelled task; beside its original if one was given."""

    task: str
    examples: int
    metrics: dict[str, float]
    """By name, from 0 to 1, the one that counts first."""
    original: dict[str, float] | None = None
    """The same of the original."""
    kl: float | None = None
    """Mean KL(original || model) of the distribution over the answers, in nats per example."""
    agreement: float | None = None
    """How often both answer the same."""

    @property
    def accuracy(self) -> float:
        return self.metrics["accuracy"]

    @property
    def original_accuracy(self) -> float | None:
        return None if self.original is None else self.original["accuracy"]

    @property
    def value(self) -> float:
        """The metric that counts."""
        return next(iter(self.metrics.values()))

    def to_dict(self) -> dict[str, Any]:
        own = {"task": self.task, "examples": self.examples, **self.metrics}
        own |= {f"original_{name}": value for name, value in (self.original or {}).items()}
        return own | {n: v for n, v in (("kl", self.kl), ("agreement", self.agreement)) if v is not None}


def _with_domains(score: TextScore | Comparison, own: dict[str, Any]) -> dict[str, Any]:
    if score.domains:
        own["domains"] = {name: domain.to_dict() for name, domain in score.domains.items()}
    return own
