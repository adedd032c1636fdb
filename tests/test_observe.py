"""Statistics: equal to a plain count, blind to padding, mergeable, and safe in their files."""

from __future__ import annotations

import json

import pytest
import torch

from moepress.errors import MoepressError
from moepress.models.find import find_layers
from moepress.models.walk import CalibrationBatch, walk
from moepress.observe import STATISTICS, LayerShape, Statistics
from moepress.observe.output_norm import peaks

from . import zoo

ALL = STATISTICS.names()


def calibration(name: str, model, count: int = 2) -> list[CalibrationBatch]:
    batches = []
    for seed in range(count):
        inputs = zoo.batch(model, name, seed=seed)
        keep = {"decoder": inputs["attention_mask"].bool()}
        if "decoder_input_ids" in inputs:
            keep = {"encoder": keep["decoder"], "decoder": torch.ones_like(inputs["decoder_input_ids"]).bool()}
            inputs["labels"] = inputs["decoder_input_ids"].roll(-1, 1)
        batches.append(CalibrationBatch(inputs, keep))
    return batches


def gather(name: str, batches=None, names=ALL):
    model = zoo.build(name)
    statistics = Statistics()
    for visit in walk(model, batches or calibration(name, model)):
        statistics.gather(visit, names)
    return model, statistics


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "switch_transformers"])
def test_equal_to_a_plain_count(name):
    model, statistics = gather(name)
    batches = calibration(name, model)
    for visit in walk(model, batches):
        counts = torch.zeros(visit.layer.num_experts, dtype=torch.float64)
        gram = torch.zeros(len(counts), len(counts), dtype=torch.float64)
        gated, tokens = torch.zeros_like(counts), 0
        bank = visit.layer.bank
        peak = torch.zeros_like(counts)
        said = torch.zeros(len(counts), bank.up_EFD.shape[2], dtype=torch.float64)
        added = said.clone()
        for batch in visit.batches():
            r = batch.routing
            for t in torch.arange(len(batch.keep_T))[batch.keep_T].tolist():
                tokens += 1
                gram += torch.outer(r.logits_TE[t].double(), r.logits_TE[t].double())
                for e in range(len(counts)):
                    said[e] += bank.output(e, r.hidden_TD[t])
                for index, weight in zip(r.index_TK[t].tolist(), r.weight_TK[t].tolist(), strict=True):
                    if weight == 0:  # over the expert's capacity, which transformers enforces from 5.18 on
                        continue
                    counts[index] += 1
                    gated[index] += weight * bank.output(index, r.hidden_TD[t : t + 1]).norm().item()
                    peak[index] = max(peak[index], bank.output(index, r.hidden_TD[t]).norm())
                    added[index] += weight * bank.output(index, r.hidden_TD[t])
        usage = statistics.of(visit.layer, "usage")
        assert torch.equal(usage["count"], counts) and usage["tokens"].item() == tokens
        assert torch.allclose(statistics.of(visit.layer, "router-gram")["gram"], gram, rtol=1e-5)
        assert torch.allclose(statistics.of(visit.layer, "output-norm")["gated"], gated, rtol=1e-4)
        assert statistics.of(visit.layer, "features")["count"].sum() == counts.sum()
        assert torch.allclose(statistics.of(visit.layer, "gated-output")["sum"], added, rtol=1e-3, atol=1e-5)
        found = peaks(statistics.of(visit.layer, "output-norm"))
        assert bool((found >= 0.9999 * peak).all() and (found <= peak * 1.12).all())  # 1.12: the 32nd root of 36 tokens
        assert torch.allclose(statistics.of(visit.layer, "mean-output")["sum"], said, rtol=1e-3, atol=1e-5)
        assert statistics.of(visit.layer, "mean-output")["tokens"].item() == tokens


def test_a_sample_is_spread_over_all_batches(monkeypatch):
    monkeypatch.setattr(STATISTICS.get("mean-output"), "sampled", 6)
    model, statistics = gather("qwen3_moe", names=["mean-output", "usage"])
    for visit in walk(model, calibration("qwen3_moe", model)):
        bank, expected = visit.layer.bank, 0
        for batch in visit.batches():
            real = torch.where(batch.keep_T)[0]
            some = real[torch.linspace(0, len(real) - 1, 3).long()]
            expected += torch.stack([bank.output(e, batch.routing.hidden_TD[some]).double().sum(0) for e in range(8)])
        assert statistics.of(visit.layer, "mean-output")["tokens"].item() == 6
        assert torch.allclose(statistics.of(visit.layer, "mean-output")["sum"], expected, rtol=1e-4, atol=1e-6)


def test_padding_changes_nothing():
    model = zoo.build("qwen3_moe")
    ids = torch.randint(3, 90, (2, 6), generator=torch.Generator().manual_seed(0))
    real = CalibrationBatch(dict(input_ids=ids), dict(decoder=torch.ones(2, 6, dtype=torch.bool)))
    longer = torch.cat([ids, torch.zeros(2, 3, dtype=torch.long)], dim=1)
    mask = torch.cat([torch.ones(2, 6), torch.zeros(2, 3)], dim=1).long()
    padded = CalibrationBatch(dict(input_ids=longer, attention_mask=mask), dict(decoder=mask.bool()))
    one, two = Statistics(), Statistics()
    for statistics, batch in ((one, real), (two, padded)):
        for visit in walk(model, [batch]):
            statistics.gather(visit, ALL)
    for (*_, key, first), (*_, second) in zip(one._each(), two._each(), strict=True):
        # A high power makes much of a difference in rounding.
        assert torch.allclose(first, second, rtol=1e-3 if key == "power" else 1e-5, atol=1e-5), key


def test_two_runs_merge_into_one():
    model = zoo.build("mixtral")
    batches = calibration("mixtral", model, 3)
    _, together = gather("mixtral", batches)
    _, first = gather("mixtral", batches[:1])
    _, rest = gather("mixtral", batches[1:])
    merged = first.merge(rest)
    for (*_, a), (*_, b) in zip(together._each(), merged._each(), strict=True):
        assert torch.allclose(a, b, rtol=1e-12)
    _, other = gather("switch_transformers")
    with pytest.raises(MoepressError, match="cannot be merged"):
        first.merge(other)


def test_file_holds_the_same_bits(tmp_path):
    _, statistics = gather("mixtral")
    statistics.save(tmp_path / "s")
    loaded = Statistics.load(tmp_path / "s")
    assert all(torch.equal(a, b) for (*_, a), (*_, b) in zip(statistics._each(), loaded._each(), strict=True))


def test_damaged_files_are_one_sentence(tmp_path):
    with pytest.raises(MoepressError, match="no statistics"):
        Statistics.load(tmp_path / "s")
    _, statistics = gather("mixtral")
    statistics.save(tmp_path / "s")
    header = json.loads((tmp_path / "s.json").read_text())
    (tmp_path / "s.json").write_text(json.dumps(header | {"format_version": 99}))
    with pytest.raises(MoepressError, match="format_version"):
        Statistics.load(tmp_path / "s")
    (tmp_path / "s.json").write_text(json.dumps(header))
    weights = (tmp_path / "s.safetensors").read_bytes()
    (tmp_path / "s.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(MoepressError):
        Statistics.load(tmp_path / "s")


def test_not_finite_is_refused():
    model = zoo.build("mixtral")
    find_layers(model)[0].bank.up_EFD.fill_(float("nan"))
    with pytest.raises(MoepressError, match="not finite"):
        for visit in walk(model, calibration("mixtral", model)):
            Statistics().gather(visit, ALL)


@pytest.mark.parametrize("name", ALL)
def test_bytes_are_what_is_allocated(name):
    shape = LayerShape(5, 7, 3)
    made = STATISTICS.create(name, shape=shape)
    assert STATISTICS.get(name).bytes(shape) == sum(t.nbytes for t in made.sums.values())
