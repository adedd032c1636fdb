"""What a fairseq language model is, in the words of its public ports."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig


class FairseqMoeConfig(PreTrainedConfig):
    """The defaults are those of the model with 15 B parameters; `sparse_step=0` makes a dense one."""

    model_type = "fairseq_moe"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {
        "d_model": "hidden_size",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
    }

    vocab_size: int = 51200
    max_position_embeddings: int = 2048
    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    intermediate_size: int = 3072
    activation_function: str = "gelu"
    resid_dropout: float | int = 0.1
    embed_dropout: float | int = 0.0
    attention_dropout: float | int = 0.1
    activation_dropout: float | int = 0.0
    initializer_range: float = 0.02
    use_cache: bool = True
    pad_token_id: int | None = 1
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 2
    unk_token_id: int | None = 3
    no_scale_embedding: bool = False
    tie_word_embeddings: bool = True
    sparse_step: int = 2
    """Every so many layers one has experts; 0: none has."""
    router_bias: bool = False
    num_experts: int = 512
    drop_tokens: bool = False
    """Whether an expert that is full sends tokens away, as in the published evaluations; otherwise it has room for all.
    `expert_capacity` tokens fit in, or `moe_eval_capacity_token_fraction` of them, or else twice an equal share."""
    expert_capacity: int | None = None
    router_ignore_padding_tokens: bool = True
    router_dtype: str = "float32"
    second_expert_policy: str = "all"
    normalize_router_prob_before_dropping: bool = False
    batch_prioritized_routing: bool = False
    moe_eval_capacity_token_fraction: float = -1.0
    moe_token_dropout: float | int = 0.2
    output_router_logits: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        from moepress.fairseq.register import register_model

        super().__post_init__(**kwargs)
        register_model()
