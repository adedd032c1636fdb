"""One small training run, in this process or in one that is killed: python -m tests.training_run FOLDER KILL_AT."""

import copy
import os
import signal
import sys
from pathlib import Path

import torch

from moepress.data import window_batches
from moepress.recovery import RecoverOptions, TrainingHook, recover

from . import zoo

IDS = torch.randint(3, 96, (12, 10), generator=torch.Generator().manual_seed(0))
OPTIONS = {"steps": 9, "batch_size": 4, "lr": 3e-3, "warmup": 2, "evaluate_every": 2, "save_every": 2, "patience": 9}


def disturbed(model, scale=0.5):
    """The same model with noise on its experts."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in other.named_parameters():
        if ".experts." in name:
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.data += scale * parameter.data.std() * noise
    return other


def batches_of(model):
    """Rows of several lengths."""
    return [batch for length in (10, 7, 4) for batch in window_batches(IDS[:, :length], model.config, batch_size=4)]


class Average(TrainingHook):
    """Scales one weight by what it has seen so far: training depends on the hook's memory."""

    def __init__(self, model, stop_at=None, stop=None):
        self.model, self.stop_at, self.stop, self.mean = model, stop_at, stop, 0.0

    def after_step(self, step):
        weight = self.model.get_input_embeddings().weight
        self.mean = 0.5 * self.mean + 0.5 * float(weight.detach().abs().mean())
        weight.data[5] *= self.mean
        if step == self.stop_at:
            self.stop()

    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, state):
        self.mean = state["mean"]


def run(state=None, resume=False, stop_at=None, stop=None, **options):
    """(report, student) of a run; `stop()` is called after step `stop_at`."""
    teacher = zoo.build("qwen3_moe")
    student = disturbed(teacher)
    hook = Average(student, stop_at, stop)
    chosen = RecoverOptions(**OPTIONS | options)
    return recover(student, teacher, batches_of(teacher), chosen, [hook], state=state, resume=resume), student


def main():
    folder, kill_at = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    kill = (lambda: os.kill(os.getpid(), signal.SIGKILL)) if kill_at else None
    report, student = run(folder / "state", resume=True, stop_at=kill_at, stop=kill)
    if os.environ.get("RANK", "0") == "0":
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        torch.save(
            {"report": report.to_dict(), "weights": student.state_dict(), "processes": processes}, folder / "result.pt"
        )


if __name__ == "__main__":
    main()
