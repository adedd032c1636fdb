import copy
import math

import pytest
import torch

from moepress.data import CalibrationData, calibration_batches, read_windows, task_examples, window_batches
from moepress.errors import MoepressError
from moepress.evaluation import compare, evaluating, in_dtype, logits, perplexity, task_metrics
from moepress.tasks import TASKS, Example

from . import zoo

IDS = torch.randint(3, 96, (4, 10), generator=torch.Generator().manual_seed(0))


def perturbed(model, scale=0.1):
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator)
    return other


@pytest.fixture(scope="module")
def model():
    return zoo.build("qwen3_moe")


@pytest.fixture(scope="module")
def seq2seq():
    model = zoo.build("switch_transformers")
    model.config.decoder_start_token_id = 0
    return model


# ---- text -------------------------------------------------------------------------------------------------------


def test_perplexity_is_that_of_the_models_own_loss(model):
    with torch.no_grad():
        loss = float(model(input_ids=IDS, labels=IDS).loss)
    score = perplexity(model, IDS, batch_size=3)
    assert score.tokens == 4 * 9 and score.loss == pytest.approx(loss, rel=1e-5)
    assert score.perplexity == pytest.approx(math.exp(loss), rel=1e-5) and not score.domains


def test_every_token_counts_the_same(model):
    score = perplexity(model, {"long": IDS, "short": IDS[:1, :4]})
    assert {name: own.tokens for name, own in score.domains.items()} == {"long": 36, "short": 3}
    assert score.nats == pytest.approx(sum(own.nats for own in score.domains.values()))
    assert set(score.to_dict()["domains"]["long"]) == {"tokens", "loss", "perplexity"}


def test_padding_does_not_count(model):
    ragged = [window_batches(IDS[:1, :5], model.config)[0], window_batches(IDS[1:2], model.config)[0]]
    alone = sum(perplexity(model, [batch]).nats for batch in ragged)
    from moepress.data.batches import to_batches
    from moepress.data.samples import Sample

    rows = [IDS[0, :5].tolist(), IDS[1].tolist()]
    (both,) = to_batches([Sample(row, row) for row in rows], model.config, 2)
    assert both.inputs["input_ids"].shape == (2, 10)
    assert perplexity(model, [both]).nats == pytest.approx(alone, rel=1e-5)


def test_compare_with_itself(model):
    same = compare(model, copy.deepcopy(model), IDS)
    assert same.kl == pytest.approx(0, abs=1e-6) and same.agreement == 1
    assert same.model.nats == pytest.approx(same.original.nats)


def test_compare_by_hand(model):
    other = perturbed(model)
    score = compare(other, model, {"a": IDS[:3], "b": IDS[3:]})
    with torch.no_grad():
        q, p = (m(input_ids=IDS).logits[:, :-1].double().log_softmax(-1) for m in (other, model))
    kl_BL = (p.exp() * (p - q)).sum(-1)
    assert score.kl == pytest.approx(float(kl_BL.mean()), rel=1e-4)
    assert score.domains["b"].kl == pytest.approx(float(kl_BL[3:].mean()), rel=1e-4)
    assert score.agreement == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    assert score.to_dict()["original_perplexity"] == pytest.approx(perplexity(model, IDS).perplexity)


def test_small_pieces_give_the_same(model, monkeypatch):
    other = perturbed(model)
    whole = compare(other, model, IDS)
    monkeypatch.setattr(logits, "FORWARD_BYTES", 1)
    monkeypatch.setattr(logits, "CHUNK_BYTES", 3 * 4 * 96)
    assert compare(other, model, IDS).kl == pytest.approx(whole.kl, rel=1e-5)
    assert len(list(logits.pieces(window_batches(IDS, model.config)[0], 96))) == 4


def test_encoder_decoder_models_continue_the_first_half(seq2seq):
    with torch.no_grad():
        loss = float(seq2seq(input_ids=IDS[:, :5].contiguous(), labels=IDS[:, 5:].contiguous()).loss)
    score = perplexity(seq2seq, IDS)
    assert score.tokens == 4 * 5 and score.loss == pytest.approx(loss, rel=1e-5)
    assert compare(perturbed(seq2seq), seq2seq, IDS).kl > 0.001


def test_batches_from_text(model, word_tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text(" ".join(f"w{i}" for i in range(3, 80)))
    options = CalibrationData(str(tmp_path / "a.txt"), length=16, pack="window", samples="all")
    assert perplexity(model, calibration_batches(options, word_tokenizer, model.config)).tokens == 4 * 15


def test_different_vocabularies(model):
    other = copy.deepcopy(model)
    other.resize_token_embeddings(80)
    with pytest.raises(MoepressError, match="vocabulary of 80 and the original one of 96"):
        compare(other, model, IDS)


def test_nothing_to_predict(model):
    with pytest.raises(MoepressError, match="there is no text to evaluate on"):
        perplexity(model, IDS[:, :1])


# ---- precision --------------------------------------------------------------------------------------------------


def test_the_model_is_as_before(model):
    narrow = copy.deepcopy(model).to(torch.bfloat16).train()
    gate = narrow.model.layers[-1].mlp.gate.weight  # a router in full precision among 16-bit weights
    gate.data = gate.data.float()
    before = {name: (tensor.dtype, tensor.clone()) for name, tensor in narrow.state_dict().items()}
    score = perplexity(narrow, IDS)
    assert narrow.training and torch.is_grad_enabled()
    for name, tensor in narrow.state_dict().items():
        assert tensor.dtype == before[name][0] and tensor.equal(before[name][1])
    widened = copy.deepcopy(narrow).float()
    assert score.loss == pytest.approx(perplexity(widened, IDS).loss, rel=1e-6)
    assert perplexity(narrow.bfloat16(), IDS, dtype=None).loss != score.loss


def test_precision_comes_back_after_an_error(model):
    narrow = copy.deepcopy(model).to(torch.bfloat16)
    with pytest.raises(KeyError), evaluating(narrow):
        assert next(narrow.parameters()).dtype == torch.float32
        raise KeyError
    assert next(narrow.parameters()).dtype == torch.bfloat16


def test_offloaded_weights_keep_their_precision():
    with torch.device("meta"):
        away = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    with pytest.raises(MoepressError, match="offloaded"), in_dtype(away, torch.float32):
        pass


# ---- tasks ------------------------------------------------------------------------------------------------------

EXAMPLES = [
    Example("w5 w6 w7", ("w8", "w9 w10"), 0),
    Example("w5 w11", ("w8", "w9 w10"), 1),
    Example("w12", ("w13", "w14", "w15 w16 w17"), 2),
]


def by_hand(model, example, choice):
    """Log-probability of a choice, token after token."""
    prompt, answer = ([int(word[1:]) for word in text.split()] for text in (example.prompt, choice))
    if model.config.is_encoder_decoder:
        answer = [*answer, 2]
        inputs = {"input_ids": torch.tensor([[*prompt, 2]]), "decoder_input_ids": torch.tensor([[0, *answer[:-1]]])}
    else:
        inputs = {"input_ids": torch.tensor([prompt + answer[:-1]])}
    with torch.no_grad():
        logp = model(**inputs).logits[0, -len(answer) :].log_softmax(-1)
    return sum(float(row[token]) for row, token in zip(logp, answer, strict=True))


@pytest.mark.parametrize("kind", ["model", "seq2seq"])
def test_choices_are_scored_as_whole_sequences(kind, request, word_tokenizer):
    from moepress.evaluation.task import score_choices

    model = request.getfixturevalue(kind)
    scores = score_choices(model, TASKS.create("sst2"), EXAMPLES, word_tokenizer, batch_size=3)
    for example, score_C in zip(EXAMPLES, scores, strict=True):
        expected = [by_hand(model, example, choice) for choice in example.choices]
        assert score_C.tolist() == pytest.approx(expected, rel=1e-4)


def test_task_metrics(model, word_tokenizer):
    task = TASKS.create("sst2")
    alone = task_metrics(model, task, EXAMPLES, tokenizer=word_tokenizer)
    assert alone.kl is None and alone.examples == 3 and "kl" not in alone.to_dict()
    same = task_metrics(model, task, EXAMPLES, copy.deepcopy(model), tokenizer=word_tokenizer)
    assert same.kl == pytest.approx(0, abs=1e-6) and same.agreement == 1
    assert same.original_accuracy == same.accuracy == alone.accuracy
    other = task_metrics(perturbed(model), task, EXAMPLES, model, tokenizer=word_tokenizer)
    assert other.kl > 0.001 and other.original_accuracy == alone.accuracy
    with pytest.raises(MoepressError, match="there are no examples"):
        task_metrics(model, task, [], tokenizer=word_tokenizer)


# ---- the small trained models -----------------------------------------------------------------------------------


def load(folder, seq2seq=False):
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    auto = AutoModelForSeq2SeqLM if seq2seq else AutoModelForCausalLM
    return auto.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def test_qwen3moe_tiny_on_two_domains(fixtures):
    model, _ = load(fixtures / "models/qwen3moe-tiny")
    windows = read_windows(fixtures / "data/windows-8k/validation.safetensors")
    score = perplexity(model, {name: windows[name][:2] for name in ("books", "languages")})
    assert score.domains["books"].perplexity == pytest.approx(50.604, abs=0.02)
    assert score.domains["languages"].perplexity == pytest.approx(4.888, abs=0.005)


@pytest.mark.slow
def test_qwen3moe_tiny_on_all_windows(fixtures):
    model, _ = load(fixtures / "models/qwen3moe-tiny")
    score = perplexity(model, read_windows(fixtures / "data/windows-8k/validation.safetensors"))
    assert score.tokens == 6 * 24 * 511 and score.perplexity == pytest.approx(22.47, abs=0.01)


def without_experts(model):
    """The control: all MoE layers but the first of the encoder say nothing."""
    other = copy.deepcopy(model)
    for stack in (other.encoder, other.decoder):
        for number, block in enumerate(stack.block):
            mlp = block.layer[-1].mlp
            if hasattr(mlp, "experts") and (stack is other.decoder or number > 1):
                for parameter in mlp.experts.parameters():
                    parameter.data.zero_()
    return other


@pytest.mark.slow
def test_switch_tiny_needs_its_experts(fixtures):
    model, _ = load(fixtures / "models/switch-tiny", seq2seq=True)
    windows = read_windows(fixtures / "data/windows-8k/validation.safetensors")
    score = compare(without_experts(model), model, {name: ids[:6, :256] for name, ids in windows.items()})
    assert score.original.loss == pytest.approx(3.71, abs=0.005) and score.model.loss == pytest.approx(4.57, abs=0.01)


def test_switch_tiny_sst2_on_some_sentences(fixtures):
    model, tokenizer = load(fixtures / "models/switch-tiny-sst2", seq2seq=True)
    task, examples = task_examples("sst2", folder=fixtures / "data/tasks", limit=96)
    assert task_metrics(model, task, examples, tokenizer=tokenizer).accuracy == pytest.approx(78 / 96)


@pytest.mark.slow
def test_switch_tiny_sst2_on_all_sentences(fixtures):
    model, tokenizer = load(fixtures / "models/switch-tiny-sst2", seq2seq=True)
    task, examples = task_examples("sst2", folder=fixtures / "data/tasks")
    score = task_metrics(without_experts(model), task, examples, model, tokenizer=tokenizer)
    assert (score.examples, round(score.original_accuracy, 4), round(score.accuracy, 4)) == (872, 0.7787, 0.7833)
    assert score.kl == pytest.approx(0.0107, abs=0.0001)


# ---- lm-evaluation-harness --------------------------------------------------------------------------------------

LM_EVAL_TASK = """
task: moepress_local
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{prompt}}}}"
doc_to_choice: ["negative", "positive"]
doc_to_target: label
metric_list:
  - metric: acc
"""


def test_lm_eval_needs_a_tokenizer(model):
    pytest.importorskip("lm_eval")
    from moepress.evaluation.lm_eval import lm_eval_model

    with pytest.raises(MoepressError, match="needs its tokenizer"):
        lm_eval_model(model)


@pytest.mark.slow
@pytest.mark.parametrize("given", ["path", "model"])
def test_lm_eval_runs_a_local_task(fixtures, tmp_path, monkeypatch, given):
    import json

    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    from moepress.evaluation.lm_eval import lm_eval_model

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    task, examples = task_examples("sst2", folder=fixtures / "data/tasks", limit=12)
    rows = [json.dumps({"prompt": e.prompt, "label": e.label}) for e in examples]
    (tmp_path / "test.jsonl").write_text("\n".join(rows))
    (tmp_path / "local.yaml").write_text(LM_EVAL_TASK.format(data=tmp_path / "test.jsonl"))
    folder = fixtures / "models/demo-moe"
    model, tokenizer = load(folder)
    results = lm_eval.simple_evaluate(
        model=lm_eval_model(folder) if given == "path" else lm_eval_model(model, tokenizer),
        tasks=["moepress_local"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )
    own = task_metrics(model, task, examples, tokenizer=tokenizer, dtype=None)
    assert results["results"]["moepress_local"]["acc,none"] == pytest.approx(own.accuracy)
