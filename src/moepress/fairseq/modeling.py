"""A decoder of fairseq: sinusoidal positions, norms before attention and FFN, biases everywhere, a tied head. Its
attention, FFN and router are those of NLLB-MoE, which comes from fairseq as well.

Shape suffixes: B rows, L tokens of a row, P tokens of a row with those in the cache, D width, T tokens, E experts.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.models.nllb_moe.modeling_nllb_moe import (
    NllbMoeAttention,
    NllbMoeDenseActDense,
    NllbMoeScaledWordEmbedding,
    NllbMoeSinusoidalPositionalEmbedding,
    NllbMoeSparseMLP,
    NllbMoeTop2Router,
)
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from moepress.fairseq.configuration import FairseqMoeConfig
from moepress.runtime.nllb import RoutedNllbExperts

OFFSET = 2
"""Row of the first position. The row before is zero and that of padding."""


class FairseqMoeTop2Router(NllbMoeTop2Router):
    """Says anew in each call how many tokens an expert has room for; NLLB's remembers the number of its first call."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.drop_tokens = config.drop_tokens
        if not config.drop_tokens:
            self.moe_eval_capacity_token_fraction = 1.0  # each token comes to an expert at most once

    def route_tokens(self, router_logits: Tensor, *args: Any, **kwargs: Any) -> tuple:
        configured = self.expert_capacity
        if not self.drop_tokens:
            self.expert_capacity = len(router_logits)
        try:
            return super().route_tokens(router_logits, *args, **kwargs)
        finally:
            self.expert_capacity = configured


class FairseqMoeSparseMLP(NllbMoeSparseMLP):
    def __init__(self, config: Any) -> None:
        nn.Module.__init__(self)
        self.router = FairseqMoeTop2Router(config)
        self.num_experts = config.num_experts
        self.experts = RoutedNllbExperts(config, config.intermediate_size)


class FairseqMoePositions(NllbMoeSinusoidalPositionalEmbedding):
    def __init__(self, config: FairseqMoeConfig) -> None:
        super().__init__(config.max_position_embeddings, config.hidden_size, padding_idx=OFFSET - 1)

    @torch.no_grad()
    def forward(self, positions_BL: Tensor) -> Tensor:  # type: ignore[override]
        if (longest := int(positions_BL.max()) + 1) > len(self.weights):
            self.make_weights(longest, self.embedding_dim, self.padding_idx)
        return self.weights[positions_BL]


class FairseqMoeDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self.self_attn = NllbMoeAttention(
            config.hidden_size,
            config.num_heads,
            config.attention_dropout,
            is_decoder=True,
            is_causal=True,
            config=config,
            layer_idx=index,
        )
        self.self_attn_layer_norm = nn.LayerNorm(config.hidden_size)
        sparse = config.sparse_step > 0 and (index + 1) % config.sparse_step == 0
        self.ffn = FairseqMoeSparseMLP(config) if sparse else NllbMoeDenseActDense(config, config.intermediate_size)
        self.final_layer_norm = nn.LayerNorm(config.hidden_size)
        self.dropout = config.resid_dropout

    def forward(
        self, x_BLD: Tensor, attention_mask: Tensor | None = None, past_key_values: Cache | None = None, **kwargs: Any
    ) -> Tensor:
        y_BLD, _ = self.self_attn(
            self.self_attn_layer_norm(x_BLD), past_key_values=past_key_values, attention_mask=attention_mask, **kwargs
        )
        x_BLD = x_BLD + dropout(y_BLD, self.dropout, self.training)
        y_BLD = self.ffn(self.final_layer_norm(x_BLD))
        return x_BLD + dropout(y_BLD, self.dropout, self.training)


class FairseqMoePreTrainedModel(PreTrainedModel):
    config: FairseqMoeConfig
    config_class = FairseqMoeConfig
    base_model_prefix = "decoder"
    supports_gradient_checkpointing = True
    _no_split_modules = ["FairseqMoeDecoderLayer"]
    _supports_sdpa = True
    # Buffers of the ports that carry nothing.
    _keys_to_ignore_on_load_unexpected = [r"embed_positions\._float_tensor", r"self_attn\.(masked_)?bias"]

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, FairseqMoePositions):
            rows = module.num_positions + module.offset
            init.copy_(module.weights, module.get_embedding(rows, module.embedding_dim, module.padding_idx))


class FairseqMoeModel(FairseqMoePreTrainedModel):
    _can_record_outputs = {
        "hidden_states": FairseqMoeDecoderLayer,
        "attentions": OutputRecorder(NllbMoeAttention, index=1),
        "router_logits": OutputRecorder(FairseqMoeTop2Router, index=2),
    }

    def __init__(self, config: FairseqMoeConfig) -> None:
        super().__init__(config)
        scale = 1.0 if config.no_scale_embedding else math.sqrt(config.hidden_size)
        padding: Any = config.pad_token_id
        self.embed_tokens = NllbMoeScaledWordEmbedding(
            config.vocab_size, config.hidden_size, padding, embed_scale=scale
        )
        self.embed_positions = FairseqMoePositions(config)
        self.layers = nn.ModuleList([FairseqMoeDecoderLayer(config, i) for i in range(config.num_layers)])
        self.layer_norm = nn.LayerNorm(config.hidden_size)
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> MoeModelOutputWithPast:
        """`position_ids` count from 0. Without them, as in fairseq, only tokens that are no padding are counted."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        x_BLD = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        seen = past_key_values.get_seq_length() if past_key_values is not None else 0
        if position_ids is None:
            positions_BL = self.positions(x_BLD, input_ids, attention_mask, seen)
        else:
            positions_BL = position_ids + OFFSET
        mask = create_causal_mask(
            config=self.config, inputs_embeds=x_BLD, attention_mask=attention_mask, past_key_values=past_key_values
        )
        x_BLD = x_BLD + self.embed_positions(positions_BL).to(x_BLD)
        x_BLD = dropout(x_BLD, float(self.config.embed_dropout), self.training)
        for layer in self.layers:
            x_BLD = layer(x_BLD, mask, past_key_values=past_key_values, use_cache=use_cache, **kwargs)
        return MoeModelOutputWithPast(last_hidden_state=self.layer_norm(x_BLD), past_key_values=past_key_values)

    def positions(self, x_BLD: Tensor, input_ids: Tensor | None, attention_mask: Tensor | None, seen: int) -> Tensor:
        """The row of each token's position: 1 for padding, otherwise 1 + how many tokens there are up to it."""
        length = x_BLD.shape[1]
        if attention_mask is not None and attention_mask.dim() == 2:
            real_BP = attention_mask.long()
            return ((real_BP.cumsum(1) * real_BP) + OFFSET - 1)[:, -length:]
        if input_ids is None or self.config.pad_token_id is None or seen:
            return torch.arange(seen, seen + length, device=x_BLD.device)[None] + OFFSET
        real_BL = (input_ids != self.config.pad_token_id).long()
        return real_BL.cumsum(1) * real_BL + OFFSET - 1


class FairseqMoeForCausalLM(FairseqMoePreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "decoder.embed_tokens.weight"}

    def __init__(self, config: FairseqMoeConfig) -> None:
        super().__init__(config)
        self.decoder = FairseqMoeModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> MoeCausalLMOutputWithPast:
        output = self.decoder(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(output.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return MoeCausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=output.past_key_values,
            hidden_states=output.hidden_states,
            attentions=output.attentions,
            router_logits=output.router_logits,
        )
