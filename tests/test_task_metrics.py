"""Metrics against libraries, answers against a model's own generate, and the ways of scoring choices."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moepress.data import task_examples
from moepress.data.batches import prompt_batches
from moepress.errors import MoepressError
from moepress.evaluation import task_metrics
from moepress.evaluation.metrics import accuracy, f1_of_words, f1_of_yes, same_words, written_scores
from moepress.evaluation.task import score_choices
from moepress.evaluation.written import forced_answers, written_answers
from moepress.tasks import TASKS, Example

from . import zoo
from .texts import words, write

QUESTION = Example(words(5, 6, 7), (words(8, 9), words(10)), 1)
WRITTEN = [
    Example(words(5, 6, 7, 8), (words(9),), 0, (words(9), words(3))),
    Example(words(11), (words(12),), 0, (words(12),)),
]


@pytest.fixture(scope="module")
def causal():
    return zoo.build("qwen3_moe")


@pytest.fixture(scope="module")
def switch():
    model = zoo.build("switch_transformers")
    model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = 0
    return model


def test_choice_metrics_equal_sklearn():
    metrics = pytest.importorskip("sklearn.metrics")
    draw = torch.Generator().manual_seed(0)
    labels, chosen = (torch.randint(0, 2, (50,), generator=draw).tolist() for _ in range(2))
    assert accuracy(labels, chosen) == pytest.approx(metrics.accuracy_score(labels, chosen))
    assert f1_of_yes(labels, chosen) == pytest.approx(metrics.f1_score(labels, chosen))
    assert f1_of_yes([0, 0], [0, 0]) == 0


def test_written_answers_are_compared_with_all_references():
    squad = TASKS.create("squad")
    references = [("The cat.", "a small dog"), ("Paris",), ("1,000 men",)]
    scores = written_scores(squad, references, ["cat", "in paris", "nobody"])
    assert scores["exact_match"] == pytest.approx(1 / 3) and scores["f1"] == pytest.approx((1 + 2 / 3 + 0) / 3)
    assert list(scores) == ["f1", "exact_match"]


@given(*[st.text(alphabet="aTnhe .,-\u201c'é9", max_size=24)] * 2)
def test_words_are_compared_as_in_the_library(right, text):
    squad = pytest.importorskip("transformers.data.metrics.squad_metrics", reason="newer transformers have it no more")
    assert same_words(right, text) == squad.compute_exact(right, text)
    assert f1_of_words(right, text) == pytest.approx(squad.compute_f1(right, text))


@pytest.mark.parametrize("kind", ["causal", "switch"])
def test_written_answers_are_what_generate_gives_alone(kind, word_tokenizer, request):
    model = request.getfixturevalue(kind)
    squad = TASKS.create("squad")
    together = written_answers(model, squad, WRITTEN, word_tokenizer, batch_size=2, new=5)
    alone = [written_answers(model, squad, [example], word_tokenizer, new=5)[0] for example in WRITTEN]
    assert together == alone and all(alone)
    ids = word_tokenizer(WRITTEN[0].prompt)["input_ids"]
    ids = ids if kind == "causal" else [*ids, 2]
    out = model.generate(torch.tensor([ids]), max_new_tokens=5, do_sample=False, pad_token_id=0)[0]
    own = out[len(ids) :] if kind == "causal" else out
    assert alone[0] == word_tokenizer.decode(own, skip_special_tokens=True).strip()


def test_prompts_are_padded_on_the_side_where_they_end(causal, switch, word_tokenizer):
    prompts = [words(5, 6, 7), words(8), words(*range(10, 30))]
    (left,) = prompt_batches(prompts, word_tokenizer, causal.config, 3, 4)
    assert left["input_ids"].tolist() == [[0, 5, 6, 7], [0, 0, 0, 8], [26, 27, 28, 29]]
    assert left["attention_mask"].tolist() == [[0, 1, 1, 1], [0, 0, 0, 1], [1, 1, 1, 1]]
    (right,) = prompt_batches(prompts[:2], word_tokenizer, switch.config, 3, 4)
    assert right["input_ids"].tolist() == [[5, 6, 7, 2], [8, 2, 0, 0]]


def log_probabilities(model, ids):
    return model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)


@torch.no_grad()
def test_ways_of_scoring(causal, word_tokenizer):
    task = TASKS.create("copa")
    ids = [5, 6, 7, 8, 9]
    logp = log_probabilities(causal, ids)
    expected = [float(logp[i, ids[i + 1]]) for i in range(4)]
    by = {way: score_choices(causal, task, [QUESTION], word_tokenizer, scoring=way)[0] for way in ("sum", "mean")}
    assert float(by["sum"][0]) == pytest.approx(expected[2] + expected[3], rel=1e-5)
    assert float(by["mean"][0]) == pytest.approx((expected[2] + expected[3]) / 2, rel=1e-5)
    # The authors' way: eos for the line break and at the end, and padding expected behind it.
    whole = [5, 6, 7, 2, 8, 9, 2]
    logp = log_probabilities(causal, whole)
    wanted = [*whole[1:], 0]
    paper = score_choices(causal, task, [QUESTION], Spaced(word_tokenizer), scoring="paper")[0]
    assert float(paper[0]) == pytest.approx(sum(float(logp[i, t]) for i, t in enumerate(wanted)) / 7, rel=1e-5)


class Spaced:
    """The word tokenizer knows eos only between spaces."""

    def __init__(self, tokenizer):
        self.tokenizer, self.eos_token, self.pad_token_id = tokenizer, " </s> ", 0

    def __call__(self, text, **options):
        return self.tokenizer(text, **options)


@torch.no_grad()
def test_teacher_forced_answers(switch, word_tokenizer):
    task = TASKS.create("squad")
    (text,) = forced_answers(switch, task, WRITTEN[:1], word_tokenizer)
    logits = switch(input_ids=torch.tensor([[5, 6, 7, 8, 2]]), decoder_input_ids=torch.tensor([[0, 9]])).logits[0]
    assert text == word_tokenizer.decode(logits.argmax(-1), skip_special_tokens=True).strip()


@pytest.mark.parametrize("name", ["squad", "copa"])
@pytest.mark.parametrize("kind", ["causal", "switch"])
def test_against_itself(kind, name, word_tokenizer, request):
    model = request.getfixturevalue(kind)
    task, examples = TASKS.create(name), WRITTEN if name == "squad" else [QUESTION] * 2
    for scoring in (None, "teacher-forced"):
        score = task_metrics(model, task, examples, model, tokenizer=word_tokenizer, scoring=scoring, length=32)
        assert score.metrics == score.original and score.agreement == 1 and score.examples == 2
        assert (score.kl is None) == (name == "squad" or scoring is not None)
        assert set(score.to_dict()) >= {*task.metrics, *(f"original_{metric}" for metric in task.metrics)}


@pytest.mark.parametrize(
    ("kind", "name", "scoring", "message"),
    [
        ("causal", "squad", "mean", "has no choices to score"),
        ("switch", "copa", "paper", "is for decoder-only models"),
        ("causal", "copa", "meen", "unknown scoring 'meen': did you mean 'mean'"),
    ],
)
def test_ways_that_do_not_fit(kind, name, scoring, message, word_tokenizer, request):
    model = request.getfixturevalue(kind)
    with pytest.raises(MoepressError, match=message):
        task_metrics(model, TASKS.create(name), WRITTEN, tokenizer=word_tokenizer, scoring=scoring)


def test_evaluate_by_name(tmp_path, word_tokenizer, causal):
    import moepress

    write(
        tmp_path / "squad/validation.jsonl",
        [{"context": words(5, 6), "question": words(7), "answers": {"text": [words(8)]}}] * 2,
    )
    score = moepress.evaluate(causal, against=causal, task=f"squad@{tmp_path}", tokenizer=word_tokenizer, length=40)
    assert score["examples"] == 2 and score["f1"] == score["original_f1"] and score["agreement"] == 1


def test_the_fixture_writes_its_answers(fixtures):
    """A fine-tuned model that writes says what it also finds most probable."""
    from moepress.checkpoint.load import load_model, load_tokenizer

    folder = fixtures / "models/switch-tiny-sst2"
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    task, examples = task_examples("sst2", folder=fixtures / "data/tasks", limit=64)
    chosen = task_metrics(model, task, examples, tokenizer=tokenizer)
    forced = task_metrics(model, task, examples, tokenizer=tokenizer, scoring="teacher-forced")
    written = [text == e.answer for text, e in zip(written_answers(model, task, examples, tokenizer), examples)]
    assert sum(written) / 64 == pytest.approx(chosen.accuracy, abs=0.04)
    assert forced.accuracy == pytest.approx(chosen.accuracy, abs=0.04)
