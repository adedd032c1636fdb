"""The tiny models that the other tests rely on: they run, repeat and use their experts."""

from __future__ import annotations

import re

import pytest
import torch

from . import zoo

# JetMoE keeps the expert matrices in the block itself, and has a mixture in its attention too.
ROUTED = re.compile(r"(?<!attention)\.experts\.|\.mlp\.output_linear\.")


@pytest.mark.parametrize("name", zoo.FAMILIES)
def test_builds_and_repeats(name: str) -> None:
    model, again = zoo.build(name), zoo.build(name)
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not any(p.isnan().any() for p in model.parameters())
    state = again.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())

    inputs = zoo.batch(model, name)
    assert (inputs["attention_mask"] == 0).any()
    with torch.inference_mode():
        logits = model(**inputs).logits
        assert logits.isfinite().all()
        assert torch.equal(logits, again(**zoo.batch(again, name)).logits)


@pytest.mark.parametrize("name", zoo.FAMILIES)
def test_seed_and_experts_matter(name: str) -> None:
    model = zoo.build(name)
    inputs = zoo.batch(model, name)
    with torch.inference_mode():
        logits = model(**inputs).logits
        assert not torch.allclose(logits, zoo.build(name, seed=1)(**inputs).logits)
        assert not torch.equal(inputs["input_ids"], zoo.batch(model, name, seed=1)["input_ids"])
        # Without its routed experts the model must say something else.
        for key, param in model.named_parameters():
            if ROUTED.search(key):
                param.zero_()
        assert (model(**inputs).logits - logits).std() > 0.02 * logits.std()
