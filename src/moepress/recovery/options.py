"""What can be decided about recovery, and what it reports."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from moepress.errors import MoepressError
from moepress.registry import did_you_mean

Objective = Literal["task", "text"]
Train = Literal["all", "experts", "router"]


@dataclass(frozen=True)
class RecoverOptions:
    """The defaults are those of the MC-SMoE paper where it names them."""

    steps: int = 200
    lr: float = 3e-4
    batch_size: int = 16
    """Samples of a step, on each process."""
    objective: Objective = "text"
    """task: cross-entropy on the labels + alpha * KL(teacher || student); text: the KL alone, on every token."""
    alpha: float = 0.2
    """Weight of the KL in the task objective."""
    temperature: float | None = None
    """Of the KL; by default 2 in the task objective, 1 in the text objective."""
    train: Train = "all"
    warmup: int = 16
    """Steps of linear warm-up, at most half of all; a linear decay to zero follows."""
    weight_decay: float = 0.01
    clip: float = 1.0
    """Largest norm of the gradient."""
    seed: int = 0
    teacher_dtype: Literal["float32", "own"] = "float32"
    """Precision of a 16-bit teacher's forward pass. The student always trains on fp32 weights."""

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("batch_size", 1), ("warmup", 0)):
            if getattr(self, name) < least:
                raise MoepressError(f"recover: {name} must be at least {least}, not {getattr(self, name)}")
        for name in ("lr", "clip", "softening"):
            if not getattr(self, name) > 0:
                raise MoepressError(f"recover: {name.replace('softening', 'temperature')} must be above 0")
        for name in ("alpha", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise MoepressError(f"recover: {name} must not be negative, and is {getattr(self, name)}")
        for name, known in (("objective", get_args(Objective)), ("train", get_args(Train))):
            if (value := getattr(self, name)) not in known:
                raise MoepressError(f"recover: unknown {name} {value!r}: {did_you_mean(str(value), list(known))}")

    @property
    def softening(self) -> float:
        """The temperature in use."""
        if self.temperature is not None:
            return self.temperature
        return 2.0 if self.objective == "task" else 1.0


@dataclass
class RecoverReport:
    """How training went, one entry a step."""

    loss: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    """KL(teacher || student) at the temperature in use, nats per token; empty without a teacher."""
    stopped: str | None = None
    """Why training ended before its last step."""

    @property
    def steps(self) -> int:
        """Steps that were made. If the loss broke off, the last of them has been taken back."""
        return len(self.loss)

    def to_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, **asdict(self)}
