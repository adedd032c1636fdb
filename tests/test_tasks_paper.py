"""The paper's tasks: prompts character by character, both forms of their records, and what is wrong with a record."""

import json

import pytest

from moepress.data import task_examples
from moepress.errors import MoepressError
from moepress.tasks import TASKS, Example

from .texts import write

MULTIRC = {
    "paragraph": "Ann fed the cat.\nThen she left.",
    "question": "Who was fed?",
    "answer": "the cat",
    "label": 1,
}
PASSAGE = {
    "passage": {
        "text": "Ann fed the cat.\nThen she left.",
        "questions": [
            {
                "question": "Who was fed?",
                "answers": [{"text": "the cat", "label": 1}, {"text": "Ann", "label": 0}],
            },
            {"question": "Who left?", "answers": [{"text": "Ann", "label": 1}]},
        ],
    }
}
COPA = {
    "premise": "The lamp went out.",
    "choice1": "The bulb broke.",
    "choice2": "It rained.",
    "question": "cause",
    "label": 0,
}
BOOK = {
    "question_stem": "Ice is",
    "choices": {"text": ["warm", "cold", "loud"], "label": ["A", "B", "C"]},
    "answerKey": "B",
}
SQUAD = {
    "context": "Rain fell on Monday.",
    "question": "When did rain fall?",
    "answers": {"text": ["Monday", "on Monday"], "answer_start": [13, 10]},
}
HOTPOT = {
    "question": "Which is larger?",
    "answer": "Blue Lake",
    "context": [["Blue Lake", ["It is 9 km long. ", "It is deep."]], ["Moor", ["Nothing here."]],
                ["Red Lake", ["It is old. ", "It is 5 km long."]]],
    "supporting_facts": [["Blue Lake", 0], ["Red Lake", 0], ["Red Lake", 1]],
}  # fmt: skip
HUB_HOTPOT = HOTPOT | {
    "context": {"title": [t for t, _ in HOTPOT["context"]], "sentences": [s for _, s in HOTPOT["context"]]},
    "supporting_facts": {"title": ["Blue Lake", "Red Lake", "Red Lake"], "sent_id": [0, 0, 1]},
}
HOTPOT_PROMPT = (
    'Answer the following question, "Which is larger?", using the information provided below.\n\n\n'
    "  - It is 9 km long. \n\n  - It is old. It is 5 km long."
)
GOOD = [
    (
        "mrpc",
        {"sentence1": "A dog ran.", "sentence2": "A dog was running.", "label": 1},
        "Does the sentence\nA dog ran.\n"
        "paraphrase (that is, mean the same thing as) this sentence?\nA dog was running.",
        ("no", "yes"),
        1,
    ),
    (
        "multirc",
        MULTIRC,
        "Ann fed the cat.\nThen she left.\n\nQuestion: Who was fed?\n"
        'I found this answer "the cat". Is that correct? Yes or no?',
        ("No", "Yes"),
        1,
    ),
    (
        "copa",
        COPA,
        "The lamp went out. \n\nWhat's the best option?\n- The bulb broke.\n- It rained.\n\n"
        "We are looking for  a cause",
        ("The bulb broke.", "It rained."),
        0,
    ),
    (
        "copa",
        COPA | {"question": "effect", "label": 1},
        "The lamp went out. \n\nWhat's the best option?\n- The bulb broke.\n- It rained.\n\n"
        "We are looking for  an effect",
        ("The bulb broke.", "It rained."),
        1,
    ),
    (
        "winogrande",
        {"sentence": "Ann met Eve because _ called.", "option1": "Ann", "option2": "Eve", "answer": "2"},
        "The _ in the sentence below refers to Ann. True or False?\nAnn met Eve because _ called.",
        ("true", "false"),
        1,
    ),
    (
        "wikiqa",
        {"question": "what is ice", "answer": "Ice is frozen water.", "document_title": "Ice", "label": 1},
        "This is a correct answer to the following question about Ice. Yes or no?\n"
        "Answer: Ice is frozen water.\nQuestion: what is ice",
        ("No", "Yes"),
        1,
    ),
    (
        "wikiqa",
        {"question": "what is ice", "answer": "Ice is frozen water.", "label": 0},
        "This is a correct answer to the following question. Yes or no?\n"
        "Answer: Ice is frozen water.\nQuestion: what is ice",
        ("No", "Yes"),
        0,
    ),
    (
        "openbookqa",
        BOOK,
        "Ice is\n\nPick the right answer from the list:\n- warm\n- cold\n- loud",
        ("warm", "cold", "loud"),
        1,
    ),
]


@pytest.mark.parametrize(("name", "record", "prompt", "choices", "label"), GOOD)
def test_prompts_of_choices(name, record, prompt, choices, label):
    task = TASKS.create(name)
    assert task.kind == "choice" and task.missing(record) is None
    assert task.examples(record) == [Example(prompt, choices, label)]


def test_prompt_of_squad():
    (example,) = TASKS.create("squad").examples(SQUAD)
    assert example.prompt == (
        "Rain fell on Monday.\n\nQ: When did rain fall?\n\n"
        "Referring to the passage above, the correct answer to the given question is"
    )
    assert example.answer == "Monday" and example.references == ("Monday", "on Monday")


@pytest.mark.parametrize("record", [HOTPOT, HUB_HOTPOT])
def test_prompt_of_hotpotqa(record):
    (example,) = TASKS.create("hotpotqa").examples(record)
    assert example.prompt == HOTPOT_PROMPT and example.references == ("Blue Lake",)
    bare = {name: value for name, value in record.items() if name != "supporting_facts"}
    assert "\n  - It is 9 km long. It is deep.\n\n  - Nothing here.\n" in TASKS.create("hotpotqa").example(bare).prompt


def test_a_passage_holds_many_examples():
    examples = TASKS.create("multirc").examples(PASSAGE)
    assert examples[0] == TASKS.create("multirc").example(MULTIRC)
    assert [(e.prompt.split('"')[1], e.label) for e in examples] == [("the cat", 1), ("Ann", 0), ("Ann", 1)]


def test_long_fields_are_clipped():
    record = SQUAD | {"context": "word " * 1000}
    assert len(TASKS.create("squad").example(record).prompt) < 2300


WRONG = [
    ("mrpc", {"label": "1"}, "label must be 0 .no. or 1 .yes., not '1'"),
    ("mrpc", {"label": -1}, "label must be 0"),
    ("mrpc", {"label": True}, "label must be 0"),
    ("mrpc", {"sentence2": None}, "sentence2 must be a text, not None"),
    ("copa", {"question": "why"}, "question must be cause or effect, not 'why'"),
    ("winogrande", {"answer": 1}, "answer must be the text 1 or 2, not 1"),
    ("openbookqa", {"answerKey": "E"}, "answerKey must be one of A, B, C, not 'E'"),
    ("squad", {"answers": {"text": []}}, "answers.text must hold at least one text"),
    ("hotpotqa", {"answer": ""}, "answer is empty"),
]
RECORDS = {name: record for name, record, *_ in GOOD} | {"squad": SQUAD, "hotpotqa": HOTPOT}


@pytest.mark.parametrize(("name", "change", "message"), WRONG)
def test_labels_of_the_wrong_kind_name_the_line(tmp_path, name, change, message):
    write(tmp_path / "train.jsonl", [RECORDS[name], RECORDS[name] | change])
    with pytest.raises(MoepressError, match=f"line 2: {message}"):
        task_examples(name, "train", tmp_path)


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_missing_fields_name_line_and_field(tmp_path, name):
    for field in TASKS.create(name).fields:
        left = {key: value for key, value in RECORDS[name].items() if key != field}
        write(tmp_path / "train.jsonl", [RECORDS[name], left])
        with pytest.raises(MoepressError, match=f"line 2: there is no field '{field}'"):
            task_examples(name, "train", tmp_path)


@pytest.mark.parametrize(
    ("path", "field"),
    [(("text",), "passage.text"), (("questions", 0, "question"), "question"),
     (("questions", 0, "answers", 1, "label"), "label"), (("questions", 1, "answers"), "answer")],
)  # fmt: skip
def test_missing_fields_of_a_passage(tmp_path, path, field):
    record = json.loads(json.dumps(PASSAGE))
    inner = record["passage"]
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    write(tmp_path / "train.jsonl", [PASSAGE, record])
    with pytest.raises(MoepressError, match=f"line 2: there is no field '{field}'"):
        task_examples("multirc", "train", tmp_path)


COUNTS = {"sst2": 872, "mrpc": 408, "multirc": 4848, "copa": 100, "winogrande": 1267, "squad": 10565, "wikiqa": 1126,
          "hotpotqa": 1061, "openbookqa": 500}  # fmt: skip


@pytest.mark.parametrize("name", sorted(COUNTS))
def test_whole_validation_splits(fixtures, name):
    task, examples = task_examples(name, folder=fixtures / "data/tasks")
    assert len(examples) == COUNTS[name]
    assert all(e.prompt and len(e.prompt) < 6500 and e.answer for e in examples)
    assert len({e.label for e in examples}) > 1 or task.kind == "written"


@pytest.mark.parametrize("name", sorted(COUNTS))
def test_calibration_by_task_name(tmp_path, word_tokenizer, name):
    from moepress.data.batches import CalibrationData, calibration_batches

    from . import zoo

    record = {"sentence": "fine", "label": 1} if name == "sst2" else RECORDS[name]
    write(tmp_path / name / "train.jsonl", [record] * 3)
    for family in ("qwen3_moe", "switch_transformers"):
        model = zoo.build(family)
        model.config.decoder_start_token_id = 0
        options = CalibrationData(source=f"task:{name}@{tmp_path}", samples=2, length=48)
        (batch,) = calibration_batches(options, word_tokenizer, model.config)
        assert len(batch.inputs["input_ids"]) == 2 and bool((batch.inputs["labels"] != -100).any())
