"""A compact model does what its native class does: generate, train, adapt, compile, offload."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments

from moepress.checkpoint.compact import attach, compact_specs, save_compact
from moepress.checkpoint.load import load_model
from moepress.models.find import find_layers
from tests import zoo
from tests.squeeze import (  # noqa: F401
    apart,
    assert_same_files,
    assert_same_tensors,
    build,
    duplicated,
    loaded_from_files,
    logits,
    saved,
    silent,
    squeeze,
)

# ---- running ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "switch_transformers"])
@pytest.mark.parametrize(
    "way", [{}, {"do_sample": True, "top_k": 20}, {"num_beams": 3}], ids=["greedy", "sampled", "beam"]
)
def test_generate(name: str, way: dict[str, Any], tmp_path: Path) -> None:
    original = build(name)
    model = copy.deepcopy(original)
    save_compact(model, squeeze(model, "redirect"), tmp_path)
    loaded, full = load_model(tmp_path), duplicated(original, model)
    inputs = {key: value for key, value in zoo.batch(model, name, batch=1).items() if not key.startswith("decoder")}
    texts = []
    for each in (full, loaded):
        torch.manual_seed(0)
        texts.append(each.generate(**inputs, max_new_tokens=6, min_new_tokens=6, **way))
    assert torch.equal(*texts)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "jamba", "granitemoe"])
def test_experts_implementations(name: str) -> None:
    """Each kernel of transformers gives what it gives with the experts written out."""
    original = build(name)
    model = copy.deepcopy(original)
    squeeze(model, "redirect")
    full = duplicated(original, model)
    for implementation in ("eager", "batched_mm", "grouped_mm"):
        model.set_experts_implementation(implementation)
        full.set_experts_implementation(implementation)
        # batched_mm multiplies each token and expert apart, the others group tokens by expert: other orders of adding
        bound = 0.0 if implementation == "batched_mm" else 5e-6
        assert apart(logits(model, name), logits(full, name)) <= bound, implementation


@pytest.mark.parametrize("router", ["redirect", "rows"])
def test_compile(router: str, tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path, router)
    model = load_model(tmp_path)
    inputs = zoo.batch(model, "qwen3_moe", batch=1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    try:
        with torch.no_grad():
            expected = model(**inputs, use_cache=False).logits
            assert apart(compiled(**inputs, use_cache=False).logits, expected) <= 1e-5
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize("masked", [False, True])
def test_load_balancing_loss(masked: bool) -> None:
    """With a redirect it is that of the original router. With fewer rows it needs equally many in all layers, and is
    an error otherwise, not a wrong number."""
    original = build("qwen3_moe")

    def loss(model: PreTrainedModel) -> float:
        inputs = zoo.batch(model, "qwen3_moe")
        if not masked:
            del inputs["attention_mask"]
        with torch.no_grad():
            return float(model(**inputs, labels=inputs["input_ids"], output_router_logits=True).aux_loss)

    model = copy.deepcopy(original)
    attach(model, squeeze(model, "redirect"))
    assert loss(model) == pytest.approx(loss(duplicated(original, model)), abs=1e-5)

    uniform = copy.deepcopy(original)
    attach(uniform, squeeze(uniform, "rows", (4,)))
    assert 1 < loss(uniform) < 4

    uneven = copy.deepcopy(original)
    attach(uneven, squeeze(uneven, "rows", (3, 5)))
    with pytest.raises(RuntimeError):
        loss(uneven)


# ---- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "jamba", "switch_transformers", "llama4"])
def test_gradients_of_duplicates_add_up(name: str) -> None:
    original = build(name)
    model = copy.deepcopy(original)
    squeeze(model, "redirect")
    full = duplicated(original, model)
    for each in (model, full):
        torch.manual_seed(0)
        each(**zoo.batch(each, name)).logits.square().mean().backward()
        with torch.no_grad():
            for parameter in each.parameters():
                parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    written_out = {layer.name: layer for layer in find_layers(full)}
    for layer in find_layers(model):
        other = written_out[layer.name]
        expert_map = layer.adapter.expert_map(layer.block)
        assert expert_map is not None
        for key, ours in layer.bank.tensors().items():
            added = torch.zeros_like(ours).index_add_(0, expert_map, other.bank.tensors()[key])
            assert added.abs().max() > 0
            torch.testing.assert_close(ours, added, rtol=1e-3, atol=1e-5)
        for key, ours in layer.router.tensors.items():
            torch.testing.assert_close(ours, other.router.tensors[key], rtol=1e-3, atol=1e-5)


class Repeated(Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(3 + i, 11 + i)
        return {"input_ids": ids, "labels": ids}


def trainer(model: Any, folder: Path, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, report_to=[], disable_tqdm=True, use_cpu=True,
        save_only_model=False, learning_rate=1e-2, seed=0, **options,
    )  # fmt: skip
    return Trainer(model=model, args=arguments, train_dataset=Repeated())


def test_trainer(tmp_path: Path) -> None:
    """A step, `save_model`, checkpoints that can be resumed from, and the guard in all of them."""
    # Fused files: from others, transformers' Trainer does not resume the experts of any model.
    model = loaded_from_files("qwen3_moe", tmp_path / "source", fused=True)
    save_compact(model, squeeze(model, "redirect"), tmp_path / "a")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    run = trainer(loaded, tmp_path / "run", max_steps=2, save_steps=1)
    run.train()
    run.save_model(str(tmp_path / "b"))
    trained = load_model(tmp_path / "b")
    assert_same_tensors(trained, loaded)
    assert compact_specs(trained) == compact_specs(model)
    for layer in find_layers(loaded):
        before = model.get_submodule(layer.name).experts.gate_up_proj
        assert not torch.equal(layer.block.experts.gate_up_proj, before)
        assert torch.equal(layer.block.gate.expert_map, model.get_submodule(layer.name).gate.expert_map)

    again = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    trainer(again, tmp_path / "run", max_steps=2, save_steps=1).train(
        resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1")
    )
    assert_same_tensors(again, loaded)


@pytest.mark.parametrize("name", ["qwen3_moe", "switch_transformers"])
def test_lora_on_attention(name: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    saved(name, tmp_path)
    names = ["q_proj", "v_proj"] if name == "qwen3_moe" else ["q", "v"]
    check_adapter(peft, tmp_path, name, peft.LoraConfig(r=2, target_modules=names))


def test_lora_on_experts(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    saved("qwen3_moe", tmp_path)
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    check_adapter(peft, tmp_path, "qwen3_moe", config)


def check_adapter(peft: Any, folder: Path, name: str, config: Any) -> None:
    """One step moves the adapter only; saved and loaded on a fresh compact model it computes the same."""
    base = load_model(folder)
    before = copy.deepcopy(base.state_dict())
    model = peft.get_peft_model(base, config)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    for _ in range(2):  # the first moves B away from zero, the second A
        torch.manual_seed(0)
        model(**zoo.batch(base, name)).logits.square().mean().backward()
        optimizer.step()
    moved = [p for n, p in model.named_parameters() if "lora" in n]
    assert moved and all(torch.isfinite(p).all() for p in moved)
    model.eval()
    adapted = logits(model, name)
    model.save_pretrained(folder / "adapter")
    fresh = load_model(folder)
    assert all(torch.equal(tensor, before[key]) for key, tensor in fresh.state_dict().items())
    assert apart(adapted, logits(fresh, name)) > 1e-3
    restored = peft.PeftModel.from_pretrained(fresh, folder / "adapter").eval()
    assert apart(logits(restored, name), adapted) <= 1e-5
    merged = restored.merge_and_unload()
    assert apart(logits(merged, name), adapted) <= 1e-4
    merged.save_pretrained(folder / "merged")
    assert apart(logits(load_model(folder / "merged"), name), adapted) <= 1e-4


# ---- the evaluation harness ------------------------------------------------------------------------------------------


TASK = """
task: moepress_local
dataset_path: json
dataset_kwargs: {data_files: {validation: DATA}}
output_type: multiple_choice
validation_split: validation
doc_to_text: "{{text}}"
doc_to_choice: ["w5", "w6"]
doc_to_target: 0
metric_list: [{metric: acc}]
"""


@pytest.mark.slow
def test_evaluation_harness(tmp_path: Path, word_tokenizer: Any) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    os.environ["HF_DATASETS_CACHE"] = str(tmp_path / "cache")
    saved("qwen3_moe", tmp_path / "model")
    word_tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text('{"text": "w3 w4"}\n{"text": "w7 w8 w9"}\n')
    (tmp_path / "task.yaml").write_text(TASK.replace("DATA", str(tmp_path / "data.jsonl")))
    results = lm_eval.simple_evaluate(
        model=HFLM(pretrained=str(tmp_path / "model"), device="cpu"),
        tasks=["moepress_local"],
        task_manager=TaskManager(include_path=str(tmp_path)),
        bootstrap_iters=0,
    )
    assert 0 <= results["results"]["moepress_local"]["acc,none"] <= 1
