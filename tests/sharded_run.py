"""Training runs of processes that split the student: python -m tests.sharded_run FOLDER CASE…, under torchrun.

accelerate leaves FSDP out where processes run on CPUs. Here, and nowhere else, it is told not to; everything after
that is its own FSDP2, over gloo.
"""

import copy
import os
import sys
from functools import partial
from pathlib import Path

import torch

from moepress.errors import MoepressError
from moepress.recovery import RecoverOptions, TrainingHook, loop, recover
from moepress.training import recover as recover_files

from . import zoo
from .squeeze import squeeze
from .training_run import OPTIONS, batches_of, disturbed

FSDP = {
    "ACCELERATE_USE_CPU": "true",
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",  # as accelerate's own launcher has it
}
SHORT = OPTIONS | {"steps": 4}


class Killed(Exception):
    pass


def also_on_cpus():
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    begin = AcceleratorState.__init__

    def changed(self, *arguments, fsdp_plugin=None, **named):
        begin(self, *arguments, fsdp_plugin=fsdp_plugin, **named)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = self.distributed_type
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)

    AcceleratorState.__init__ = changed


def teacher_of(family):
    model = zoo.build(family)
    if model.config.is_encoder_decoder:
        model.config.decoder_start_token_id = 0
    return model


def student_of(family, form):
    model = disturbed(teacher_of(family))
    if form == "plain":
        return model
    if form == "tied":
        model.config.tie_word_embeddings = True
        model.tie_weights()
        return model
    if form == "narrow":
        return model.bfloat16()
    specs = squeeze(model, "redirect")
    if form == "factored":
        from .test_factored import decompose, prune

        prune(model, decompose(model, specs), 0.3)
    return model


def result(report, student):
    return {"report": report.to_dict(), "weights": copy.deepcopy(student.state_dict())}


def trained(family="qwen3_moe", form="plain", stop_at=None, state=None, resume=False, **options):
    """One run; after `stop_at` steps it is broken off and gone on with."""
    teacher = teacher_of(family)
    chosen = RecoverOptions(**SHORT | options)
    run = partial(recover, teacher=teacher, batches=batches_of(teacher), options=chosen, state=state)
    if stop_at:
        step = loop.Training.step

        def broken(self, number):
            if number > stop_at:
                raise Killed
            return step(self, number)

        loop.Training.step = broken
        try:
            run(student_of(family, form))
        except Killed:
            pass
        finally:
            loop.Training.step = step
    student = student_of(family, form)
    parts = []
    shard = loop.shard

    def watched(*arguments):
        model, optimizer = shard(*arguments)
        parts.append(sum(p.to_local().numel() for p in model.parameters()) / sum(p.numel() for p in model.parameters()))
        return model, optimizer

    loop.shard = watched
    try:
        report = run(student, resume=resume or bool(stop_at))
    finally:
        loop.shard = shard
    return result(report, student) | {"part": parts}


def files(source, out, teacher, text):
    report = recover_files(
        source, out, teacher=teacher, data=text, samples=16, length=32, device="cpu",
        steps=3, batch_size=4, evaluate_every=1, save_every=1,
    )  # fmt: skip
    return result(report.report, report.model)


def refused():
    class Hook(TrainingHook):
        pass

    said = []
    teacher = teacher_of("qwen3_moe")
    for hooks, options in (([Hook()], {}), ([], {"mixed_precision": "fp16"})):
        try:
            recover(disturbed(teacher), teacher, batches_of(teacher), RecoverOptions(**SHORT | options), hooks)
        except MoepressError as error:
            said.append(str(error))
    tied = teacher_of("switch_transformers")
    try:
        recover(disturbed(tied), tied, batches_of(tied), RecoverOptions(**SHORT))
    except MoepressError as error:
        said.append(str(error))
    other = disturbed(teacher, 0.1 * int(os.environ["RANK"]))
    try:
        recover(other, teacher, batches_of(teacher), RecoverOptions(**SHORT))
    except MoepressError as error:
        said.append(str(error))
    return said


def main():
    folder, cases = Path(sys.argv[1]), torch.load(Path(sys.argv[1]) / "cases.pt", weights_only=True)
    torch.set_num_threads(1)
    also_on_cpus()
    known = {"trained": trained, "files": files, "refused": refused}
    found = {name: known[what](**options) for name, (what, options) in cases.items()}
    torch.save(found, folder / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
