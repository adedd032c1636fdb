"""Training that is killed, split over processes, judged by held-out samples: it ends where it would have ended."""

import math
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moepress.errors import MoepressError
from moepress.recovery import RecoverOptions, TrainingHook, recover
from moepress.recovery import state as state_module
from moepress.recovery.loss import distillation, likeliest
from moepress.recovery.rows import Order, held_apart, rows_of, targets

from . import zoo
from .training_run import OPTIONS, batches_of, disturbed, run

pytest.importorskip("accelerate")


class Killed(BaseException):
    pass


def killed():
    raise Killed


@pytest.fixture(scope="module")
def whole():
    """The run that nothing interrupts."""
    return run()


def same_weights(one, other):
    theirs = other.state_dict() if isinstance(other, torch.nn.Module) else other
    return all(tensor.equal(theirs[name]) for name, tensor in one.state_dict().items())


# ---- going on ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 2, 5, 8])
def test_a_killed_run_ends_bit_for_bit_the_same(tmp_path, whole, at):
    with pytest.raises(Killed):
        run(tmp_path / "run", stop_at=at, stop=killed)
    report, student = run(tmp_path / "run", resume=True)
    assert report == whole[0] and same_weights(student, whole[1])
    assert len(list((tmp_path / "run").glob("step-*"))) == 1


def test_killed_while_a_state_is_written(tmp_path, whole, monkeypatch):
    def torn(source, target):
        if "step-00000004" in str(target):
            raise Killed
        os.rename(source, target)

    monkeypatch.setattr(state_module.os, "replace", torn)
    with pytest.raises(Killed):
        run(tmp_path / "run")
    monkeypatch.undo()
    report, student = run(tmp_path / "run", resume=True)
    assert report == whole[0] and same_weights(student, whole[1])


def environment():
    root = Path(__file__).parents[1]
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_sigkill(tmp_path, whole):
    command = [sys.executable, "-m", "tests.training_run", str(tmp_path), "5"]
    ended = subprocess.run(command, env=environment(), capture_output=True, timeout=180, cwd=Path(__file__).parents[1])
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    report, student = run(tmp_path / "state", resume=True)
    assert report == whole[0] and same_weights(student, whole[1])


def test_two_processes_equal_one(tmp_path, whole):
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2",
              "--master_addr", "127.0.0.1", "--master_port", str(free_port()),
              "-m", "tests.training_run", str(tmp_path), "0"]  # fmt: skip
    cpu = environment() | {"ACCELERATE_USE_CPU": "true"}
    ended = subprocess.run(launch, env=cpu, capture_output=True, timeout=180, cwd=Path(__file__).parents[1])
    assert ended.returncode == 0, ended.stderr.decode()[-3000:]
    result = torch.load(tmp_path / "result.pt", weights_only=True)
    report, student = whole
    assert result["processes"] == 2
    assert result["report"]["loss"] == pytest.approx(report.loss, rel=1e-5)
    assert [loss for _, loss in result["report"]["held_out"]] == pytest.approx(
        [x for _, x in report.held_out], rel=1e-5
    )
    for name, tensor in student.state_dict().items():
        torch.testing.assert_close(result["weights"][name], tensor, rtol=1e-4, atol=1e-5)
    with pytest.raises(MoepressError, match="started with processes=2, not 1"):
        run(tmp_path / "state", resume=True)


def test_another_run_is_not_gone_on_with(tmp_path):
    with pytest.raises(Killed):
        run(tmp_path / "run", stop_at=5, stop=killed)
    with pytest.raises(MoepressError, match="holds an interrupted run: go on with it"):
        run(tmp_path / "run")
    with pytest.raises(MoepressError, match="was started with lr=0.003, not 0.1"):
        run(tmp_path / "run", resume=True, lr=0.1)


def test_a_hook_without_a_state_cannot_be_resumed(tmp_path):
    class Old:
        def after_backward(self, step): ...

    teacher = zoo.build("qwen3_moe")
    with pytest.raises(MoepressError, match="Old has no state_dict"):
        recover(disturbed(teacher), teacher, batches_of(teacher), RecoverOptions(**OPTIONS), [Old()], state=tmp_path)


# ---- how a step is computed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [{"accumulate": 2}, {"accumulate": 4}, {"checkpointing": True}, {"cache": "full"}])
def test_the_way_of_computing_changes_nothing(whole, change):
    report, student = run(**change)
    assert report.loss == pytest.approx(whole[0].loss, rel=1e-4)
    for (name, tensor), expected in zip(student.state_dict().items(), whole[1].state_dict().values(), strict=True):
        torch.testing.assert_close(tensor, expected, rtol=1e-3, atol=1e-4, msg=name)


def test_checkpointing_an_encoder_decoder():
    teacher = zoo.build("switch_transformers")
    teacher.config.decoder_start_token_id = 0
    reports = []
    for checkpointing in (False, True):
        options = RecoverOptions(steps=2, batch_size=4, hold_out=0.0, checkpointing=checkpointing)
        reports.append(recover(disturbed(teacher), teacher, batches_of(teacher), options))
    assert reports[0].loss == pytest.approx(reports[1].loss, rel=1e-5)


def test_bf16(whole):
    report, student = run(mixed_precision="bf16")
    assert report.loss != whole[0].loss and report.loss == pytest.approx(whole[0].loss, rel=0.1)
    assert {parameter.dtype for parameter in student.parameters()} == {torch.float32}


def test_a_batch_that_cannot_be_shared():
    with pytest.raises(MoepressError, match="batch_size 4 cannot be shared.*multiple of 3"):
        run(accumulate=3)


def test_the_order_shows_every_row_equally_often():
    order = Order(rows=10, batch=4, seed=0)
    seen = [i for step in range(1, 6) for i in order(step)]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10)) and seen[:10] != seen[10:]
    assert order(3) == Order(10, 4, 0)(3) != Order(10, 4, 1)(3)


# ---- the teacher's outputs --------------------------------------------------------------------------------------


def test_the_most_probable_tokens_alone():
    draw = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(6, 20, generator=draw), 3 * torch.randn(6, 20, generator=draw)
    exact = distillation(student, teacher, 2.0)
    part = [float(distillation(student, likeliest(teacher, k, 2.0), 2.0)) for k in (2, 8, 20)]
    assert part[0] < part[1] < part[2] == pytest.approx(float(exact), rel=1e-4)


def test_what_is_kept_costs_what_is_said(tmp_path):
    tokens = sum(targets(row) for row in rows_of(batches_of(zoo.build("qwen3_moe")), "text"))
    full, top = run(tmp_path / "full", cache="full")[0], run(tmp_path / "top", cache=8)[0]
    assert full.cache_bytes == tokens * 96 * 4 and top.cache_bytes == tokens * 8 * 8
    for name, report in (("full", full), ("top", top)):
        files = (tmp_path / name / "teacher").glob("*.bin")
        assert sum(file.stat().st_size for file in files) == report.cache_bytes
    assert top.loss[-1] < top.loss[0]


def test_no_room_on_the_disk(monkeypatch, tmp_path):
    from moepress.recovery import teacher as module

    usage = module.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(MoepressError, match="would take .* kB, and the disk has 1 kB left"):
        run(tmp_path / "run", cache="full")


# ---- held-out samples -------------------------------------------------------------------------------------------


def test_held_out_rows_are_a_fixed_share():
    rows = rows_of(batches_of(zoo.build("qwen3_moe")), "text")
    learnt, judged = held_apart(rows, 0.25, 0)
    assert len(judged) == 9 and len(learnt) == 27 and not {id(r) for r in learnt} & {id(r) for r in judged}
    assert held_apart(rows, 0.0, 0)[1] == [] and len(held_apart(rows[:2], 0.01, 0)[1]) == 1


class Spoiler(TrainingHook):
    """Makes the model worse from one step on."""

    def __init__(self, model, after, settled_at=0):
        self.model, self.after, self.settled_at, self.kept = model, after, settled_at, {}

    def after_step(self, step):
        self.kept[step] = self.model.get_input_embeddings().weight.detach().clone()
        if step > self.after:
            self.model.get_input_embeddings().weight.data *= 1.5

    def settled(self, step):
        return step >= self.settled_at


def test_the_best_weights_are_kept_and_training_stops():
    teacher = zoo.build("qwen3_moe")
    student = disturbed(teacher)
    hook = Spoiler(student, after=4)
    options, batches = RecoverOptions(**OPTIONS | {"steps": 20, "patience": 2, "lr": 1e-3}), batches_of(teacher)
    report = recover(student, teacher, batches, options, [hook], held_out=batches)
    losses = dict(report.held_out)
    assert report.best == 4 and losses[4] == min(losses.values()) and list(losses) == [0, 2, 4, 6, 8]
    assert report.steps == 8 and "no improvement on held-out samples in 2 looks" in report.stopped
    assert student.get_input_embeddings().weight.equal(hook.kept[4])


def test_best_weights_wait_until_the_model_has_its_final_size():
    teacher = zoo.build("qwen3_moe")
    student = disturbed(teacher)
    hook = Spoiler(student, after=4, settled_at=6)
    options = RecoverOptions(**OPTIONS | {"steps": 10, "patience": 9})
    report = recover(student, teacher, batches_of(teacher), options, [hook])
    assert report.best == 6 and min(dict(report.held_out).values()) < dict(report.held_out)[6]


def test_nothing_is_learnt_from_samples_that_are_given_to_judge_by():
    teacher = zoo.build("qwen3_moe")
    batches = batches_of(teacher)
    options = RecoverOptions(**OPTIONS | {"steps": 2})
    report = recover(disturbed(teacher), teacher, batches[:2], options, held_out=batches[2:3])
    again = recover(disturbed(teacher), teacher, batches[:2], RecoverOptions(**OPTIONS | {"steps": 2, "hold_out": 0.0}))
    assert report.loss == again.loss and not again.held_out and len(report.held_out) == 2


def test_a_student_that_is_broken_already():
    teacher = zoo.build("qwen3_moe")
    student = disturbed(teacher)
    student.get_input_embeddings().weight.data[7] = math.nan
    with pytest.raises(MoepressError, match="not finite before training"):
        recover(student, teacher, batches_of(teacher), RecoverOptions(**OPTIONS))


# ---- trackers and options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "version"),
    [("DistributedType.FSDP", 1), ("DistributedType.DEEPSPEED", None), ("DistributedType.MEGATRON_LM", None)],
)
def test_only_one_way_of_splitting_a_model(kind, version, monkeypatch):
    from moepress.recovery.setup import check_kind

    check_kind("DistributedType.MULTI_CPU")
    check_kind("DistributedType.FSDP", 2)
    with pytest.raises(MoepressError, match="with FSDP2 only; FSDP1, DeepSpeed and Megatron are not supported"):
        check_kind(kind, version)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    check_kind("DistributedType.FSDP", 2)
    with pytest.raises(MoepressError, match="accelerate leaves it out on CPUs"):
        check_kind("DistributedType.MULTI_CPU")


def test_unknown_and_absent_trackers():
    with pytest.raises(MoepressError, match="unknown tracker 'tensorbord': did you mean 'tensorboard'"):
        run(trackers=("tensorbord",))
    with pytest.raises(MoepressError, match="the tracker 'comet_ml' is not installed: pip install"):
        run(trackers=("comet_ml",))


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with pytest.raises(MoepressError, match="writes files: say where"):
        run(trackers=("tensorboard",))
    report, _ = run(trackers=("tensorboard",), log_dir=str(tmp_path))
    events = EventAccumulator(str(tmp_path / "moepress"))
    events.Reload()
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(report.loss)
    assert {"kl", "held-out loss", "learning rate"} <= set(events.Tags()["scalars"])


@pytest.mark.parametrize(("train", "left"), [("all-but-router", ".mlp.gate."), ("moe", "self_attn")])
def test_what_stays(train, left):
    teacher = zoo.build("qwen3_moe")
    student = disturbed(teacher)
    before = {name: parameter.detach().clone() for name, parameter in student.named_parameters()}
    options = RecoverOptions(**OPTIONS | {"steps": 2, "train": train, "hold_out": 0.0})
    recover(student, teacher, batches_of(teacher), options)
    changed = {name for name, parameter in student.named_parameters() if not parameter.equal(before[name])}
    assert changed and not any(left in name for name in changed)


def test_labels_must_be_ids():
    teacher = zoo.build("qwen3_moe")
    batches = batches_of(teacher)
    batches[0].inputs["labels"] = batches[0].inputs["labels"].float()
    with pytest.raises(MoepressError, match="labels must be token ids, not float32"):
        recover(disturbed(teacher), teacher, batches, RecoverOptions(**OPTIONS | {"objective": "task"}))
