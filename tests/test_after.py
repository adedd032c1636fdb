"""What comes after compression, with other people's tools: adapters, quantisation, the evaluation harness.

llm-compressor in an environment of its own (torch==2.13.0 llmcompressor): MOEPRESS_LLMCOMPRESSOR_PYTHON=VENV/bin/python
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import moepress
from moepress.checkpoint.load import load_model, load_tokenizer
from moepress.checkpoint.sizes import disk_bytes
from tests.clients.models import ASSETS, DEMO
from tests.clients.run import HERE, python_with, run
from tests.squeeze import silent  # noqa: F401

LORA = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "experts": {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demonstration's model with half of its experts, in both formats."""
    place = tmp_path_factory.mktemp("outputs")
    few: dict[str, Any] = {"calibration.samples": 8, "calibration.length": 64}
    text = str(ASSETS / "demo-text.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moepress.api.draw_report", lambda records: records / "report.html")
        for format, method in {"compact": "m-smoe", "vanilla": "prune-refit"}.items():
            moepress.compress(DEMO, place / format, method=method, keep=0.5, format=format, calibration=text, **few)
    return {format: place / format for format in ("compact", "vanilla")}


def windows(file: str, samples: int, length: int) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    texts = [json.loads(line)["text"] for line in (ASSETS / file).read_text().splitlines()[:samples]]
    return [tokenizer(text).input_ids[:length] for text in texts]


# ---- adapters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", LORA)
@pytest.mark.parametrize("format", ["compact", "vanilla"])
def test_adapters_learn_are_saved_and_loaded(
    format: str, target: str, outputs: dict[str, Path], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    ids = torch.tensor(windows("demo-text.jsonl", 4, 48))

    def loss(model: Any) -> Any:
        return model(input_ids=ids, labels=ids).loss

    def loaded() -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(outputs[format], dtype=torch.float32)

    torch.manual_seed(0)
    model = peft.get_peft_model(loaded(), peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **LORA[target]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model.train()
    losses = []
    for _ in range(6):
        losses.append(loss(model))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.05
    model.eval()
    with torch.no_grad():
        learnt = loss(model)
        model.save_pretrained(tmp_path / "adapter")
        fresh = loaded().eval()
        assert loss(fresh) == pytest.approx(float(losses[0]), abs=1e-4)  # the output itself has not changed
        again = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter").eval()
        assert loss(again) == pytest.approx(float(learnt), abs=1e-4)
        merged = again.merge_and_unload()
        assert loss(merged) == pytest.approx(float(learnt), abs=1e-3)
        merged.save_pretrained(tmp_path / "merged")
    assert disk_bytes(tmp_path / "merged") == pytest.approx(2 * disk_bytes(outputs[format]), rel=0.01)  # from bf16


# ---- quantisation ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_llm_compressor_quantises_a_vanilla_output(outputs: dict[str, Path], tmp_path: Path) -> None:
    python = python_with("llmcompressor", "MOEPRESS_LLMCOMPRESSOR_PYTHON")
    job = {
        "folder": outputs["vanilla"],
        "windows": windows("demo-text.jsonl", 16, 128),
        "held_out": windows("demo-eval.jsonl", 16, 128),
        "out": tmp_path / "out",
        "result": tmp_path / "result.json",
    }
    run([python, HERE / "quantise.py"], job)
    result = json.loads((tmp_path / "result.json").read_text())
    kept = json.loads((outputs["vanilla"] / "config.json").read_text())["num_local_experts"]
    assert len(result["packed"]) == 4 * kept * 3 and kept == 8  # layers, experts, matrices
    assert 0 < result["kl"] < 0.2  # 4 bits cost something, and a broken model several nats
    assert result["bytes"] < 0.75 * disk_bytes(outputs["vanilla"])  # the embeddings stay as they are


# ---- the evaluation harness ------------------------------------------------------------------------------------------

TASK = """
task: moepress_choices
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: label
target_delimiter: ""
metric_list: [{metric: acc}]
"""


def sum_of_logs(model: PreTrainedModel, tokenizer: Any, text: str, choice: str) -> float:
    start, ids = len(tokenizer(text).input_ids), torch.tensor([tokenizer(text + choice).input_ids])
    with torch.no_grad():
        logs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])
    return float(logs[start - 1 :].sum())


@pytest.mark.slow
def test_lm_eval_from_the_command_line_on_a_compact_checkpoint(outputs: dict[str, Path], tmp_path: Path) -> None:
    """Which of two ways does a text go on? Its own, or that of the next text."""
    pytest.importorskip("lm_eval")
    texts = [json.loads(line)["text"].split(" ") for line in (ASSETS / "demo-eval.jsonl").read_text().splitlines()]
    ways = [" " + " ".join(words[40:50]) for words in texts]
    rows = [
        {"text": " ".join(words[:40]), "choices": [own, other] if i % 2 else [other, own], "label": 1 - i % 2}
        for i, (words, own, other) in enumerate(zip(texts, ways, ways[1:]))
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (tmp_path / "choices.yaml").write_text(TASK.replace("DATA", str(tmp_path / "data.jsonl")))
    command = [sys.executable, "-m", "moepress.evaluation.lm_eval", "--model", "hf", "--device", "cpu"]
    command += ["--model_args", f"pretrained={outputs['compact']},dtype=float32", "--tasks", "moepress_choices"]
    command += ["--include_path", tmp_path, "--output_path", tmp_path / "results"]
    run(command, path=True)
    result = json.loads(next((tmp_path / "results").rglob("*.json")).read_text())["results"]["moepress_choices"]

    model, tokenizer = load_model(outputs["compact"], dtype=torch.float32), load_tokenizer(outputs["compact"])
    right = 0
    for row in rows:
        scores = [sum_of_logs(model, tokenizer, row["text"], choice) for choice in row["choices"]]
        right += scores[row["label"]] == max(scores)
    assert len(rows) > 15 and right > len(rows) / 2
    assert result["acc,none"] == pytest.approx(right / len(rows))
