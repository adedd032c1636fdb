import pytest

from moepress.data import task_examples
from moepress.errors import MoepressError
from moepress.tasks import TASKS, Example
from moepress.tasks.base import clipped

from .texts import write


def test_sst2_has_the_prompt_of_the_paper():
    example = TASKS.create("sst2").example({"sentence": "  a gem . ", "label": 1})
    assert example == Example(
        "a gem . \nQuestion: Was that sentence positive or negative? Answer:", ("negative", "positive"), 1
    )
    assert example.answer == "positive"


@pytest.mark.parametrize("name", TASKS.names())
def test_every_task_declares_what_it_needs(name):
    task = TASKS.create(name)
    assert task.fields and task.hub[0] and task.__doc__


def test_unknown_task():
    with pytest.raises(MoepressError, match="unknown task 'sst3': did you mean 'sst2'"):
        task_examples("sst3")


def test_long_fields_are_clipped_between_words():
    assert clipped("ab " * 500) == "ab " * 500
    short = clipped("word " * 500)
    assert len(short) <= 2048 and short.endswith("word...")


@pytest.mark.parametrize("name", ["sst2/train.jsonl", "sst2/train.jsonl.gz", "train.jsonl.gz"])
def test_examples_from_a_folder(tmp_path, name):
    write(tmp_path / name, [{"sentence": "fine", "label": 1}, {"sentence": "bad", "label": 0}])
    task, examples = task_examples("sst2", "train", tmp_path)
    assert task.name == "sst2" and [e.label for e in examples] == [1, 0]
    assert len(task_examples("sst2", "train", tmp_path, limit=1)[1]) == 1


def test_examples_from_the_environment(tmp_path, monkeypatch):
    write(tmp_path / "sst2/validation.jsonl", [{"sentence": "fine", "label": 1}])
    monkeypatch.setenv("MOEPRESS_TASKS", str(tmp_path))
    assert task_examples("sst2")[1][0].answer == "positive"
    with pytest.raises(MoepressError, match="has no test.jsonl"):
        task_examples("sst2", "test")


def test_a_missing_field_names_line_and_field(tmp_path):
    write(tmp_path / "train.jsonl", [{"sentence": "fine", "label": 1}, {"sentense": "bad", "label": 0}])
    with pytest.raises(MoepressError, match=r"line 2: there is no field 'sentence' \(found: sentense, label\); did"):
        task_examples("sst2", "train", tmp_path)


def test_a_wrong_label_names_the_line(tmp_path):
    write(tmp_path / "train.jsonl", [{"sentence": "fine", "label": -1}])
    with pytest.raises(MoepressError, match="line 1: label must be 0"):
        task_examples("sst2", "train", tmp_path)


def test_a_missing_folder(tmp_path):
    with pytest.raises(MoepressError, match="there is no folder"):
        task_examples("sst2", "train", tmp_path / "nowhere")


def test_without_folder_and_network_the_error_says_what_to_do(monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.delenv("MOEPRESS_TASKS", raising=False)
    with pytest.raises(MoepressError, match="the Hub cannot be reached.*set MOEPRESS_TASKS"):
        task_examples("sst2")


def test_the_whole_validation_split(fixtures):
    _, examples = task_examples("sst2", folder=fixtures / "data/tasks")
    assert len(examples) == 872 and examples[0].prompt.startswith("one long string of cliches .\nQuestion")
