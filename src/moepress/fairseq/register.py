"""Makes the Auto classes know the model: its config as soon as they are there, and its class when a first config is
made, since before that transformers may be in the middle of being imported."""

from __future__ import annotations

from functools import cache

from transformers.models.auto.configuration_auto import AutoConfig

from moepress.fairseq.configuration import FairseqMoeConfig

AutoConfig.register(FairseqMoeConfig.model_type, FairseqMoeConfig, exist_ok=True)


@cache
def register_model() -> None:
    from transformers import AutoModelForCausalLM

    from moepress.fairseq.modeling import FairseqMoeForCausalLM

    AutoModelForCausalLM.register(FairseqMoeConfig, FairseqMoeForCausalLM, exist_ok=True)
