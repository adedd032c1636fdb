"""What can be decided about recovery, and what it reports."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from moepress.errors import MoepressError
from moepress.registry import did_you_mean

Objective = Literal["task", "text"]
Train = Literal["all", "all-but-router", "moe", "experts", "router"]
Precision = Literal["no", "bf16", "fp16"]
BETAS, EPSILON = (0.9, 0.98), 1e-6
"""Of AdamW, as in the MC-SMoE paper."""


@dataclass(frozen=True)
class RecoverOptions:
    """The defaults are those of the MC-SMoE paper where it names them. Which learning rate suits depends on how much is
    left to recover: where little is lost, 3e-4 is too high, and the held-out loss says so."""

    steps: int = 200
    lr: float | None = None
    """By default 3e-4."""
    batch_size: int = 16
    """Samples of a step, over all processes: the result does not depend on how many there are."""
    accumulate: int = 1
    """Parts that a process splits its share of a step into, to have fewer samples in memory at a time."""
    objective: Objective = "text"
    """task: cross-entropy on the labels + alpha * KL(teacher || student); text: the KL alone, on every token."""
    alpha: float = 0.2
    """Weight of the KL in the task objective."""
    temperature: float | None = None
    """Of the KL; by default 2 in the task objective, 1 in the text objective."""
    train: Train = "all"
    """moe: everything in the MoE blocks; the paper freezes the routers: all-but-router."""
    warmup: int = 16
    """Steps of linear warm-up, at most half of all; a linear decay to zero follows."""
    weight_decay: float = 0.01
    clip: float = 1.0
    """Largest norm of the gradient."""
    seed: int = 0
    teacher_dtype: Literal["float32", "own"] = "float32"
    """Precision of a 16-bit teacher's forward pass. The student always trains on fp32 weights."""
    mixed_precision: Precision | None = None
    """Of the student's forward pass; None: what accelerate is configured for."""
    checkpointing: bool = False
    """Compute activations twice instead of keeping them."""
    hold_out: float = 0.1
    """Share of the samples to judge by instead of learning from them, if there are no others for it; 0 for none."""
    evaluate_every: int = 25
    """Steps between looks at the held-out samples. The weights that were best on them are kept."""
    patience: int = 8
    """Training stops after so many looks without an improvement. Not too few: while the learning rate is high the loss
    may rise, and it falls with it."""
    cache: Literal["none", "full"] | int = "none"
    """Keep the teacher's outputs on disk: all of them (exact), or this many of the most probable tokens."""
    save_every: int = 50
    """Steps between saved states, if training has a folder for them."""
    trackers: tuple[str, ...] = ()
    """Where accelerate reports to: tensorboard, wandb, …"""
    log_dir: str | None = None
    """Folder of trackers that write files."""
    cpu: bool = False
    """Train on the CPU even if there is a GPU."""

    def __post_init__(self) -> None:
        least = {"steps": 1, "batch_size": 1, "accumulate": 1, "warmup": 0}
        least |= {"evaluate_every": 1, "patience": 1, "save_every": 1}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise MoepressError(f"recover: {name} must be at least {value}, not {getattr(self, name)}")
        for name in ("rate", "clip", "softening"):
            if not getattr(self, name) > 0:
                shown = {"softening": "temperature", "rate": "lr"}.get(name, name)
                raise MoepressError(f"recover: {shown} must be above 0, not {getattr(self, name)}")
        for name in ("alpha", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise MoepressError(f"recover: {name} must not be negative, and is {getattr(self, name)}")
        if not 0 <= self.hold_out < 1:
            raise MoepressError(f"recover: hold_out is a share of the samples, from 0 to below 1, not {self.hold_out}")
        if self.cache not in ("none", "full") and not (type(self.cache) is int and self.cache > 0):
            raise MoepressError(f"recover: cache is none, full or a number of tokens, not {self.cache!r}")
        known = {"objective": Objective, "train": Train}
        for name, kind in (known | ({"mixed_precision": Precision} if self.mixed_precision else {})).items():
            if (value := getattr(self, name)) not in get_args(kind):
                hint = did_you_mean(str(value), list(get_args(kind)))
                raise MoepressError(f"recover: unknown {name} {value!r}: {hint}")

    @property
    def rate(self) -> float:
        """The learning rate in use, at its highest."""
        if self.lr is not None:
            return self.lr
        return 3e-4

    @property
    def softening(self) -> float:
        """The temperature in use."""
        if self.temperature is not None:
            return self.temperature
        return 2.0 if self.objective == "task" else 1.0

    def factor(self, step: int) -> float:
        """What the learning rate is multiplied by in a step (from 1): linear warm-up, then linear decay."""
        warmup = min(self.warmup, self.steps // 2)
        if step <= warmup:
            return step / (warmup + 1)
        return (self.steps - step + 1) / max(1, self.steps - warmup)

    def decisive(self) -> dict[str, Any]:
        """Everything that decides which numbers come out, for a run that goes on to be the same run."""
        own = asdict(self) | {"lr": self.rate, "temperature": self.softening}
        return {name: value for name, value in own.items() if name not in ("trackers", "log_dir", "save_every")}


@dataclass
class RecoverReport:
    """How training went, one entry a step."""

    loss: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    """KL(teacher || student) at the temperature in use, nats per token; empty without a teacher."""
    held_out: list[tuple[int, float]] = field(default_factory=list)
    """(step, loss on the held-out samples); step 0 is before training."""
    best: int | None = None
    """The step whose weights were kept, if held-out samples chose them."""
    stopped: str | None = None
    """Why training ended before its last step."""
    cache_bytes: int = 0
    """What the teacher's kept outputs take on disk."""

    @property
    def steps(self) -> int:
        """Steps that were made. If the loss broke off, the last of them has been taken back."""
        return len(self.loss)

    def to_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, **asdict(self)}
