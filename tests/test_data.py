"""How text becomes batches."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from moepress.data import CalibrationData, calibration_batches, read_documents, read_windows, window_batches
from moepress.data.batches import next_token_labels
from moepress.errors import MoepressError
from moepress.models.walk import CalibrationBatch

from . import zoo
from .texts import words, write


@pytest.fixture
def config():
    return zoo.FAMILIES["qwen3_moe"].config()


@pytest.fixture
def seq2seq_config():
    config = zoo.FAMILIES["switch_transformers"].config()
    config.decoder_start_token_id = 0
    return config


@pytest.fixture
def make(word_tokenizer, config):
    def batches(source, model_config=None, **options):
        split = options.pop("split", "train")
        options = {"length": 8, "samples": "all"} | options
        return calibration_batches(
            CalibrationData(str(source), **options), word_tokenizer, model_config or config, split=split
        )

    return batches


# ---- batches of decoder-only models -----------------------------------------------------------------------------


def test_documents_are_cut_and_padded(tmp_path, make):
    path = write(tmp_path / "a.jsonl", [{"text": words(*range(10, 30))}, {"text": words(5, 6, 7)}, {"text": "w9"}])
    (batch,) = make(path)
    assert batch.inputs["input_ids"].tolist() == [[*range(10, 18)], [5, 6, 7, 0, 0, 0, 0, 0]]
    assert batch.keep["decoder"].tolist() == [[True] * 8, [True] * 3 + [False] * 5]
    assert batch.inputs["attention_mask"].equal(batch.keep["decoder"].long())
    assert batch.inputs["labels"][1].tolist() == [5, 6, 7] + [-100] * 5
    assert next_token_labels(batch)[1].tolist() == [6, 7] + [-100] * 6


def test_too_few_documents_give_further_windows(tmp_path, make):
    path = write(tmp_path / "a.jsonl", [{"text": words(*range(10, 36))}])
    (batch,) = make(path, samples=3)
    assert batch.inputs["input_ids"].tolist() == [[*range(i, i + 8)] for i in (10, 18, 26)]


def test_packed_windows(tmp_path, make):
    path = write(tmp_path / "a.jsonl", [{"text": words(*range(i, i + 5))} for i in range(10, 50, 10)])
    (batch,) = make(path, pack="window")
    assert batch.inputs["input_ids"].tolist() == [
        [10, 11, 12, 13, 14, 2, 20, 21],
        [22, 23, 24, 2, 30, 31, 32, 33],
        [34, 2, 40, 41, 42, 43, 44, 2],
    ]
    assert bool(batch.keep["decoder"].all())


def test_the_seed_decides(tmp_path, make):
    path = write(tmp_path / "a.jsonl", [{"text": words(*([i] * 9))} for i in range(3, 95)])

    def drawn(seed):
        return torch.cat([b.inputs["input_ids"] for b in make(path, samples=8, seed=seed)])

    assert drawn(1).equal(drawn(1)) and not drawn(1).equal(drawn(2))


def test_too_little_text(tmp_path, make, word_tokenizer, config):
    path = write(tmp_path / "a.jsonl", [{"text": words(5, 6, 7)}, {"text": "w9"}])
    for pack in ("document", "window"):
        with pytest.raises(MoepressError, match="holds 4 tokens \\(documents: 2\\); at least 8 are needed"):
            make(path, pack=pack)
    with pytest.raises(MoepressError, match="length 100 is more than the 64 positions"):
        make(path, length=100)
    with pytest.raises(MoepressError, match="has no tokenizer"):
        calibration_batches(CalibrationData(path, length=8), None, config)


@pytest.mark.parametrize(
    "wrong", [{"samples": 0}, {"samples": "some"}, {"length": 1}, {"batch_size": 0}, {"pack": "tight"}]
)
def test_bad_options(wrong):
    with pytest.raises(MoepressError, match=next(iter(wrong))):
        CalibrationData("a.jsonl", **wrong)


def test_a_mixture_makes_domains(tmp_path, make):
    for name, first in (("a", 10), ("b", 50)):
        write(tmp_path / f"{name}.jsonl", [{"text": words(*range(first, first + 12)), "domain": "x"}] * 9)
    batches = make(f"{tmp_path}/a.jsonl:0.25,{tmp_path}/b.jsonl:0.75", samples=8, batch_size=4)
    assert [(b.domain, len(b.inputs["input_ids"])) for b in batches] == [("a", 2), ("b", 4), ("b", 2)]
    assert bool((batches[0].inputs["input_ids"] < 50).all()) and bool((batches[1].inputs["input_ids"] >= 50).all())
    with pytest.raises(MoepressError, match="a mixture with weights needs a number of samples"):
        make(f"{tmp_path}/a.jsonl:0.25,{tmp_path}/b.jsonl:0.75")


# ---- messages ---------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}{{ '<s> ' if m.role == 'user' else 'w90 ' }}{{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}w90 {% endif %}"
)
TALK = [{"role": "user", "content": words(*range(10, 15))}, {"role": "assistant", "content": words(20, 21, 22)}]
SHARED = [{"from": "human", "value": TALK[0]["content"]}, {"from": "gpt", "value": TALK[1]["content"]}]


@pytest.fixture
def templated(word_tokenizer):
    word_tokenizer.chat_template = TEMPLATE
    yield word_tokenizer
    word_tokenizer.chat_template = None


@pytest.mark.parametrize("record", [{"messages": TALK}, {"conversations": SHARED}])
def test_messages_are_rendered(tmp_path, make, templated, record):
    (batch,) = make(write(tmp_path / "a.jsonl", [record]), length=10)
    assert batch.inputs["input_ids"].tolist() == [[1, *range(10, 15), 90, 20, 21, 22]]
    (plain,) = make(write(tmp_path / "a.jsonl", [record]), chat_template=False)
    assert plain.inputs["input_ids"].tolist() == [[*range(10, 15), 20, 21, 22]]


def test_messages_without_a_template(tmp_path, make):
    path = write(tmp_path / "a.jsonl", [{"messages": TALK}])
    with pytest.raises(MoepressError, match="line 1 holds messages, but the tokenizer has no chat template"):
        make(path)


def test_broken_messages(tmp_path, make, templated):
    path = write(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "text": "x"}]}])
    with pytest.raises(MoepressError, match="message 1 needs role and content.*it has role, text"):
        make(path)
    with pytest.raises(MoepressError, match="is plain text; chat_template=true needs messages"):
        make(write(tmp_path / "b.jsonl", [{"text": "x"}]), chat_template=True)


# ---- tasks ------------------------------------------------------------------------------------------------------


@pytest.fixture
def sst2(tmp_path):
    write(tmp_path / "train.jsonl", [{"sentence": "w10 w11", "label": 1}, {"sentence": "w12", "label": 0}])
    return f"task:sst2@{tmp_path}"


def test_a_task_in_a_decoder_only_model(sst2, make):
    (batch,) = make(sst2, length=32)
    assert batch.domain == "sst2"
    # Unknown words are w3: the question has 8 of them, the answer 1; eos follows.
    assert batch.inputs["input_ids"][0].tolist() == [10, 11, *[3] * 9, 2]
    assert batch.inputs["labels"][0].tolist() == [-100] * 10 + [3, 2]
    assert int(batch.keep["decoder"].sum()) == 12 + 11
    (short,) = make(sst2, length=4)
    assert short.inputs["labels"][0].tolist() == [-100, -100, 3, 2]
    with pytest.raises(MoepressError, match="are not packed"):
        make(sst2, pack="window")


def test_a_task_in_a_chat_template(sst2, make, templated):
    (batch,) = make(sst2, length=32, chat_template=True)
    assert batch.inputs["input_ids"][0].tolist() == [1, 10, 11, *[3] * 8, 90, 3]
    assert batch.inputs["labels"][0].tolist() == [-100] * 12 + [3]


def test_a_task_in_an_encoder_decoder_model(sst2, make, seq2seq_config):
    (batch,) = make(sst2, seq2seq_config, length=32)
    assert batch.inputs["input_ids"].tolist() == [[10, 11, *[3] * 8, 2], [12, *[3] * 8, 2, 0]]
    assert batch.keep["encoder"].sum(1).tolist() == [11, 10]
    assert batch.inputs["labels"].tolist() == [[3, 2], [3, 2]]
    assert batch.inputs["decoder_input_ids"].tolist() == [[0, 3], [0, 3]]
    assert next_token_labels(batch).equal(batch.inputs["labels"])


def test_text_in_an_encoder_decoder_model(tmp_path, make, seq2seq_config):
    path = write(tmp_path / "a.jsonl", [{"text": words(*range(10, 30))}, {"text": words(5, 6, 7, 8)}])
    (batch,) = make(path, seq2seq_config)
    # The first text goes on after its window, so only the second one's decoder is asked for eos.
    assert batch.inputs["input_ids"].tolist() == [[10, 11, 12, 13, 2], [5, 6, 2, 0, 0]]
    assert batch.inputs["labels"].tolist() == [[14, 15, 16, 17], [7, 8, 2, -100]]
    assert batch.inputs["decoder_input_ids"].tolist() == [[0, 14, 15, 16], [0, 7, 8, 2]]
    assert batch.keep["decoder"].tolist() == [[True] * 4, [True] * 3 + [False]]


@pytest.mark.parametrize("family", ["switch_transformers", "nllb_moe"])
def test_decoder_inputs_are_those_of_the_model(family):
    model = zoo.build(family)
    model.config.decoder_start_token_id = getattr(model.config, "decoder_start_token_id", 0)
    (batch,) = window_batches(torch.arange(3, 19).view(2, 8), model.config)
    seen = []
    stack = model.get_decoder()
    stack.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True)
    with torch.no_grad():
        model(input_ids=batch.inputs["input_ids"], labels=batch.inputs["labels"])
    assert seen[0].equal(batch.inputs["decoder_input_ids"])
    if own := getattr(model, "prepare_decoder_input_ids_from_labels", None):
        (again,) = window_batches(torch.arange(3, 19).view(2, 8), model.config, shift=own)
        assert again.inputs["decoder_input_ids"].equal(seen[0])


def test_an_eos_of_the_tokenizers_own_is_not_doubled(fixtures, seq2seq_config, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(fixtures / "data/tokenizers/t5")
    seq2seq_config.vocab_size = 32128
    write(tmp_path / "train.jsonl", [{"sentence": "fine", "label": 1}])
    (batch,) = calibration_batches(CalibrationData(f"task:sst2@{tmp_path}"), tokenizer, seq2seq_config)
    for name in ("input_ids", "labels"):
        assert batch.inputs[name][0].tolist().count(tokenizer.eos_token_id) == 1
        assert batch.inputs[name][0, -1] == tokenizer.eos_token_id


# ---- windows ----------------------------------------------------------------------------------------------------


def test_windows_as_they_are(tmp_path, make):
    ids = torch.randint(3, 96, (5, 12), dtype=torch.int32)
    save_file({"ids": ids}, tmp_path / "w.safetensors")
    batches = make(tmp_path / "w.safetensors", batch_size=2, samples=256)
    assert torch.cat([b.inputs["input_ids"] for b in batches]).equal(ids.long()) and batches[0].domain == "w"
    few = torch.cat([b.inputs["input_ids"] for b in make(tmp_path / "w.safetensors", samples=2)])
    assert len(few) == 2 and all(any(row.equal(own.long()) for own in ids) for row in few)


def test_windows_by_domain(tmp_path, make, seq2seq_config):
    save_file({"b": torch.full((2, 6), 5), "a": torch.full((1, 6), 7)}, tmp_path / "w.safetensors")
    assert {b.domain: b.inputs["input_ids"].shape for b in make(tmp_path / "w.safetensors")} == {
        "a": (1, 6),
        "b": (2, 6),
    }
    (batch, _) = make(tmp_path / "w.safetensors", seq2seq_config)
    assert batch.inputs["input_ids"].shape == batch.inputs["labels"].shape == (1, 3)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(3, 4), "must hold windows of token ids.*float32"),
        (torch.zeros(3, dtype=torch.int32), "must hold windows of token ids"),
        (torch.full((2, 4), 96), "token id 96, but the model knows 0 to 95"),
        (torch.full((2, 4), -1), "token id -1"),
        (torch.full((2, 70), 5), "length 70 is more than the 64 positions"),
    ],
)
def test_bad_windows(tmp_path, make, tensor, message):
    save_file({"ids": tensor}, tmp_path / "w.safetensors")
    with pytest.raises(MoepressError, match=message):
        make(tmp_path / "w.safetensors")


def test_bad_window_files(tmp_path, make):
    with pytest.raises(MoepressError, match="there is no file"):
        make(tmp_path / "w.safetensors")
    (tmp_path / "w.safetensors").write_text("no")
    with pytest.raises(MoepressError, match="is not a safetensors file"):
        make(tmp_path / "w.safetensors")
    with pytest.raises(MoepressError, match="holds token ids, not text"):
        list(read_documents(str(tmp_path / "w.safetensors")))


def test_labels_come_from_the_mask_where_a_batch_has_none():
    keep = torch.tensor([[True, True, False]])
    batch = CalibrationBatch({"input_ids": torch.tensor([[4, 5, 0]])}, {"decoder": keep})
    assert next_token_labels(batch).tolist() == [[5, -100, -100]]


# ---- the fixed windows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [258, 300, "all"])
def test_the_fixed_windows_come_through_unchanged(fixtures, samples):
    from transformers import AutoConfig

    path = fixtures / "data/windows-8k/calibration.safetensors"
    config = AutoConfig.from_pretrained(fixtures / "models/demo-moe")
    batches = calibration_batches(CalibrationData(str(path), samples=samples), None, config)
    assert torch.cat([b.inputs["input_ids"] for b in batches]).equal(load_file(path)["input_ids"].long())
    assert len(read_windows(fixtures / "data/windows-8k/validation.safetensors")) == 6


def test_the_text_of_the_fixed_windows(fixtures):
    from transformers import AutoConfig, AutoTokenizer

    folder = fixtures / "models/demo-moe"
    batches = calibration_batches(
        CalibrationData(str(fixtures / "data/windows-8k/calibration.jsonl"), samples=16),
        AutoTokenizer.from_pretrained(folder),
        AutoConfig.from_pretrained(folder),
    )
    ids = torch.cat([b.inputs["input_ids"] for b in batches])
    fixed = load_file(fixtures / "data/windows-8k/calibration.safetensors")["input_ids"]
    # A window that begins or ends inside of a character does not survive as text.
    assert sum(any(row.equal(own.long()) for own in fixed) for row in ids) >= 14
