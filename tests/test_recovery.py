import copy
import math

import pytest
import torch

from moepress.data import read_windows, window_batches
from moepress.data.batches import answer_batches
from moepress.errors import MoepressError
from moepress.evaluation import compare
from moepress.models.parameters import expert_parameters
from moepress.recovery import RecoverOptions, TrainingHook, recover
from moepress.recovery.loss import at_targets, distillation
from moepress.recovery.parameters import router_parameters
from moepress.recovery.rows import rows_of, together

from . import zoo
from .training_run import disturbed

pytest.importorskip("accelerate")

IDS = torch.randint(3, 96, (12, 10), generator=torch.Generator().manual_seed(0))
FAST = {"steps": 12, "batch_size": 6, "lr": 3e-3, "warmup": 2, "hold_out": 0.0}


@pytest.fixture(scope="module")
def teacher():
    return zoo.build("qwen3_moe")


@pytest.fixture(scope="module")
def batches(teacher):
    return window_batches(IDS, teacher.config, batch_size=4)


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def changed(model, before):
    return {name for name, parameter in model.named_parameters() if not parameter.equal(before[name])}


# ---- the loss ---------------------------------------------------------------------------------------------------


def test_distillation_is_a_sum_over_tokens():
    student, teacher = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)), torch.zeros(5, 7)
    p, q = (teacher / 2).softmax(-1), (student / 2).softmax(-1)
    assert distillation(student, teacher, 2.0).item() == pytest.approx((p * (p / q).log()).sum().item())
    assert distillation(student, student, 2.0).item() == pytest.approx(0, abs=1e-7)


def test_only_labelled_places_count():
    logits = torch.arange(12.0).view(1, 4, 3)
    assert at_targets(logits, torch.tensor([[-100, 5, -100, 6]])).tolist() == [[3, 4, 5], [9, 10, 11]]


def test_rows_of_different_batches_stand_together(teacher, word_tokenizer):
    pairs = [("w5 w6 w7", "w8"), ("w9", "w10 w11 w12")]
    (batch,) = answer_batches(pairs, word_tokenizer, teacher.config, 2, 16)
    rows = rows_of([batch, *window_batches(IDS[:1, :3], teacher.config)], "task")
    both = together(rows)
    assert both["labels"].tolist() == [[-100, -100, 8, -100], [10, 11, 12, -100], [*IDS[0, 1:3].tolist(), -100, -100]]
    assert both["attention_mask"].sum(1).tolist() == [4, 4, 3]
    everything = together(rows_of([batch], "text"))["labels"]
    assert everything.tolist() == [[6, 7, 8, -100], [10, 11, 12, -100]]


# ---- training ---------------------------------------------------------------------------------------------------


def test_the_student_comes_nearer(teacher, batches):
    student = disturbed(teacher)
    before = compare(student, teacher, IDS).kl
    report = recover(student, teacher, batches, RecoverOptions(**FAST))
    assert compare(student, teacher, IDS).kl < 0.8 * before
    assert report.steps == 12 and report.stopped is None and report.loss == report.kl
    assert {"steps", "loss", "kl", "stopped", "held_out", "best"} <= set(report.to_dict())


def test_the_task_objective_learns_the_labels(teacher, batches):
    student = disturbed(teacher)
    report = recover(student, teacher, batches, RecoverOptions(objective="task", **FAST))
    assert report.loss[-1] < 0.9 * report.loss[0] and len(report.kl) == 12
    # The first step's loss by hand, on the rows that the seed puts first.
    plain = recover(disturbed(teacher), None, batches, RecoverOptions(objective="task", alpha=0.0, **FAST))
    assert report.loss[0] == pytest.approx(plain.loss[0] + 0.2 * report.kl[0], rel=1e-5)


def test_an_encoder_decoder_student():
    teacher = zoo.build("switch_transformers")
    teacher.config.decoder_start_token_id = 0
    student = disturbed(teacher)
    batches = window_batches(IDS, teacher.config)
    before = compare(student, teacher, batches).kl
    recover(student, teacher, batches, RecoverOptions(**FAST | {"lr": 1e-3}))
    assert compare(student, teacher, batches).kl < 0.9 * before


@pytest.mark.parametrize(("train", "part"), [("experts", ".experts."), ("router", ".mlp.gate."), ("all", "")])
def test_what_is_trained(teacher, batches, train, part):
    student = disturbed(teacher)
    before, required = weights(student), {n: p.requires_grad for n, p in student.named_parameters()}
    recover(student, teacher, batches, RecoverOptions(train=train, **FAST))
    assert changed(student, before) == {name for name in before if part in name}
    assert {n: p.requires_grad for n, p in student.named_parameters()} == required
    assert all(parameter.grad is None for parameter in student.parameters())


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "dbrx", "jetmoe", "llama4", "switch_transformers"])
def test_parts_are_found_in_any_family(family):
    from moepress.models.find import find_layers

    for layer in find_layers(zoo.build(family)):
        assert sum(parameter.numel() for parameter in expert_parameters(layer)) == layer.expert_parameters
        assert router_parameters(layer)


def test_the_teacher_and_the_precision_stay(teacher, batches):
    narrow = copy.deepcopy(teacher).bfloat16().train()
    student, before = disturbed(narrow), weights(narrow)
    recover(student, narrow, batches, RecoverOptions(**FAST))
    assert {p.dtype for p in student.parameters()} == {torch.bfloat16} and student.training and narrow.training
    assert not changed(narrow, before)


def test_the_seed_decides(teacher, batches):
    losses = [
        recover(disturbed(teacher), teacher, batches, RecoverOptions(**FAST | {"steps": 4, "seed": seed})).loss
        for seed in (1, 1, 2)
    ]
    assert losses[0] == losses[1] != losses[2]


def test_a_second_run_goes_on(teacher, batches):
    student = disturbed(teacher)
    first = recover(student, teacher, batches, RecoverOptions(**FAST))
    second = recover(student, teacher, batches, RecoverOptions(**FAST))
    assert second.kl[-1] < first.kl[0]


def test_a_compact_student(teacher, batches):
    """Half of the experts behind a redirect."""
    from moepress.models.find import find_layers
    from moepress.models.layer import CompactSpec

    student = copy.deepcopy(teacher)
    for layer in find_layers(student):
        bank = layer.bank.select([0, 2, 4, 6])
        bank = bank.map(lambda _, tensor: tensor.clone())
        layer.adapter.reshape(layer.block, CompactSpec(experts=8, physical=4))
        layer.adapter.write_bank(layer.block, bank)
        layer.adapter.expert_map(layer.block).copy_(torch.arange(8) // 2)
    before = compare(student, teacher, IDS).kl
    recover(student, teacher, batches, RecoverOptions(train="experts", **FAST))
    assert compare(student, teacher, IDS).kl < 0.8 * before
    layer = find_layers(student)[0]
    assert layer.adapter.expert_map(layer.block).tolist() == [0, 0, 1, 1, 2, 2, 3, 3] and layer.bank.num_experts == 4


def test_fine_tuning_without_a_teacher(teacher, batches):
    student = disturbed(teacher)
    report = recover(student, None, batches, RecoverOptions(objective="task", alpha=0.0, **FAST))
    assert report.loss[-1] < report.loss[0] and not report.kl
    with pytest.raises(MoepressError, match="distillation needs a teacher"):
        recover(student, None, batches)


# ---- hooks ------------------------------------------------------------------------------------------------------


class Recorder(TrainingHook):
    """Keeps one row of the embedding at zero and writes down when it is called."""

    def __init__(self, model):
        self.weight = model.get_input_embeddings().weight
        self.calls = []

    def after_backward(self, step):
        self.calls.append(("backward", step, float(self.weight.grad.norm()) > 0))

    def after_step(self, step):
        self.calls.append(("step", step, True))
        self.weight.data[5] = 0

    def finish(self):
        self.calls.append(("finish", 0, True))
        self.weight.data[5] = 0


def test_hooks_take_part(teacher, batches):
    student = disturbed(teacher)
    hook = Recorder(student)
    recover(student, teacher, batches, RecoverOptions(**FAST | {"steps": 2}), [hook])
    assert hook.calls == [
        ("backward", 1, True),
        ("step", 1, True),
        ("backward", 2, True),
        ("step", 2, True),
        ("finish", 0, True),
    ]
    assert not student.get_input_embeddings().weight[5].any()


# ---- when things go wrong ---------------------------------------------------------------------------------------


class Breaker(Recorder):
    """Spoils the gradient, or the weights, at one step."""

    def __init__(self, model, at, what):
        super().__init__(model)
        self.at, self.what, self.good = at, what, None
        self.all = list(model.parameters())

    def after_backward(self, step):
        if step == self.at:
            self.good = [parameter.detach().clone() for parameter in self.all]
            if self.what == "gradient":
                self.weight.grad[3, 0] = math.nan

    def after_step(self, step):
        if step == self.at and self.what == "weights":
            self.weight.data.fill_(math.nan)

    def finish(self):
        self.calls.append(("finish", 0, True))


@pytest.mark.parametrize(
    ("what", "at", "reason"),
    [
        ("gradient", 3, "the gradient of step 3 is not finite"),
        ("weights", 3, "the loss of step 4 is nan"),
        ("weights", 12, "the last update made weights that are not finite"),
    ],
)
def test_the_last_good_weights_are_kept(teacher, batches, what, at, reason):
    student = disturbed(teacher)
    hook = Breaker(student, at, what)
    report = recover(student, teacher, batches, RecoverOptions(**FAST), [hook])
    assert report.stopped == reason and hook.calls == [("finish", 0, True)]
    assert all(good.equal(parameter) for good, parameter in zip(hook.good, student.parameters(), strict=True))


def test_another_vocabulary(teacher, batches):
    student = copy.deepcopy(teacher)
    student.resize_token_embeddings(80)
    with pytest.raises(MoepressError, match="vocabulary of 80"):
        recover(student, teacher, batches)


def test_nothing_to_learn_from(teacher):
    with pytest.raises(MoepressError, match="there is nothing to recover on"):
        recover(teacher, teacher, window_batches(IDS[:, :1], teacher.config))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 0}, "steps must be at least 1"),
        ({"lr": 0.0}, "lr must be above 0"),
        ({"temperature": -1.0}, "temperature must be above 0"),
        ({"alpha": math.nan}, "alpha must not be negative"),
        ({"objective": "txt"}, "unknown objective 'txt': did you mean 'text'"),
        ({"train": "expert"}, "unknown train 'expert': did you mean 'experts'"),
    ],
)
def test_bad_options(wrong, message):
    with pytest.raises(MoepressError, match=message):
        RecoverOptions(**wrong)


def test_default_temperatures():
    assert RecoverOptions(objective="task").softening == 2 and RecoverOptions(objective="text").softening == 1
    assert RecoverOptions(temperature=3.0).softening == 3


# ---- a small trained model --------------------------------------------------------------------------------------


def test_demo_moe_recovers(fixtures):
    from transformers import AutoModelForCausalLM

    teacher = AutoModelForCausalLM.from_pretrained(fixtures / "models/demo-moe")
    student = disturbed(teacher)
    windows = read_windows(fixtures / "data/windows-8k/calibration.safetensors")["calibration"]
    held_out = read_windows(fixtures / "data/windows-8k/validation.safetensors")
    held_out = {name: ids[:1, :128] for name, ids in held_out.items()}
    before = compare(student, teacher, held_out).kl
    options = RecoverOptions(steps=12, batch_size=8, warmup=2)
    recover(student, teacher, window_batches(windows[::4, :96], teacher.config), options)
    assert compare(student, teacher, held_out).kl < 0.9 * before
