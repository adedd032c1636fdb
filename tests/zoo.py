"""Tiny random MoE models, one per transformers family, for parametrised tests."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from moepress.fairseq.configuration import FairseqMoeConfig

Kind = Literal["fused", "variant", "moduledict"]

NUM_EXPERTS = 8
PAD_ID = 0
# 0, 1 and 2 are pad, bos and eos in every config below; 80 to 95 are kept for image placeholders and such.
TEXT_IDS = range(3, 80)


@dataclass(frozen=True)
class Family:
    """One architecture family.

    `kind` says how the experts are stored: "fused" is `gate_up_proj (E, 2I, H)` + `down_proj (E, H, I)` on
    the transformers experts interface, "variant" is any other stacked layout, "moduledict" one module per
    expert. `router` names the routing rule, not a class.
    """

    name: str
    config: Callable[[], PreTrainedConfig]
    auto: type
    kind: Kind
    router: str
    encoder_decoder: bool = False


FAMILIES: dict[str, Family] = {}

# Families whose vanilla model does not run, with the reason.
BROKEN: dict[str, str] = {}

# Offered to every config class, which takes the fields it declares. Sizes are multiples of 8, because
# torch._grouped_mm wants strides that are multiples of 16 bytes. The experts' width is not half the hidden
# size, so that no expert matrix is square and a forgotten transpose is an error. Scaling factors are not 1
# and there is more than one group, so that a test notices when they are lost.
_COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "pad_token_id": PAD_ID,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts": NUM_EXPERTS,
    "num_local_experts": NUM_EXPERTS,
    "n_routed_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "shared_expert_intermediate_size": 40,
    # A window and an index budget longer than any test sequence: otherwise a rounding difference could change
    # which keys are attended, and tests would compare attention instead of experts.
    "sliding_window": 64,
    "index_topk": 64,
    "index_head_dim": 16,
    "index_n_heads": 2,
}

# The family's `intermediate_size` is the experts' width.
_NARROW: dict[str, Any] = {"intermediate_size": 24}
# Multi-head latent attention: no grouped key/value heads.
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
_SPARSE_MLA: dict[str, Any] = _MLA | {"layer_types": ["deepseek_sparse_attention"] * 3}
# The gated delta net of the hybrid Qwen models.
_DELTA: dict[str, Any] = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
_MAMBA: dict[str, Any] = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2}
# One dense layer before two sparse ones, in the two ways configs spell it.
_DENSE_FIRST: dict[str, Any] = {"num_hidden_layers": 3, "first_k_dense_replace": 1}
_DENSE_FIRST_TYPES: dict[str, Any] = {
    "num_hidden_layers": 3,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
_KDA: dict[str, Any] = {"linear_head_dim": 8, "linear_num_heads": 4}
_GEMMA: dict[str, Any] = {
    "top_k_experts": 2,
    "global_head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention"],
}
_ERNIE: dict[str, Any] = {
    "num_hidden_layers": 3,
    "moe_num_experts": NUM_EXPERTS,
    "moe_k": 2,
    "moe_num_shared_experts": 1,
}
_MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}

# Vision and audio towers are built and saved but never run here, so they only have to be small. A config
# ignores the size names it does not use.
_VIT: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
}
_QWEN_VIT: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "depth": 1,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
_GLM_VIT: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "depth": 1,
    "out_hidden_size": 32,
    "image_size": 28,
}
_OCR_VIT: dict[str, Any] = {
    "sam_config": _VIT
    | {"output_channels": 8, "image_size": 32, "global_attn_indexes": [0], "window_size": 2, "mlp_dim": 16}
    | {"downsample_channels": [8, 16]},
    "encoder_config": _VIT | {"num_key_value_heads": 2, "vocab_size": 16, "layer_types": ["full_attention"]},
}
_AUDIO: dict[str, Any] = {
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "d_model": 16,
    "output_dim": 32,
    "downsample_hidden_size": 8,
    "num_mel_bins": 16,
    "max_source_positions": 32,
}
# Placeholder tokens at the top of the vocabulary, which `batch` does not draw.
_MEDIA_IDS: dict[str, Any] = {
    "image_token_id": 95,
    "video_token_id": 94,
    "audio_token_id": 93,
    "vision_start_token_id": 92,
    "vision_end_token_id": 91,
    "image_start_token_id": 90,
    "image_end_token_id": 89,
    "video_start_token_id": 88,
    "video_end_token_id": 87,
    "audio_start_token_id": 86,
}


def _config(cls_name: str, **overrides: Any) -> PreTrainedConfig:
    cls = getattr(transformers, cls_name)
    declared = {field.name for field in dataclasses.fields(cls)}
    # Copied, because configs edit the dicts they are given.
    return cls(**copy.deepcopy({k: v for k, v in _COMMON.items() if k in declared} | overrides))


def _nested(cls_name: str, text_cls: str, *text: dict[str, Any], **top: Any) -> Callable[[], PreTrainedConfig]:
    """A multimodal config: its MoE fields sit in `text_config`."""
    merged = {k: v for part in text for k, v in part.items()}
    return lambda: _config(cls_name, text_config=_config(text_cls, **merged), **top)


def _add(
    name: str,
    cls_name: str | Callable[[], PreTrainedConfig],
    router: str,
    *overrides: dict[str, Any],
    auto: type | str = AutoModelForCausalLM,
    kind: Kind = "fused",
    encoder_decoder: bool = False,
    **more: Any,
) -> None:
    merged = {k: v for part in (*overrides, more) for k, v in part.items()}
    config = partial(_config, cls_name, **merged) if isinstance(cls_name, str) else cls_name
    auto_cls = getattr(transformers, auto) if isinstance(auto, str) else auto
    FAMILIES[name] = Family(name, config, auto_cls, kind, router, encoder_decoder)


# fmt: off
# --- softmax, then top-k
_add("mixtral", "MixtralConfig", "softmax-topk", _NARROW)
_add("minimax", "MiniMaxConfig", "softmax-topk", _NARROW, block_size=4,
     layer_types=["linear_attention", "full_attention"])
_add("qwen2_moe", "Qwen2MoeConfig", "softmax-topk", num_hidden_layers=3, mlp_only_layers=[0],
     num_experts_per_tok=3, norm_topk_prob=False)
_add("qwen3_moe", "Qwen3MoeConfig", "softmax-topk", num_hidden_layers=3, mlp_only_layers=[0])
_add("qwen3_next", "Qwen3NextConfig", "softmax-topk", _DELTA)
_add("qwen3_5_moe", "Qwen3_5MoeTextConfig", "softmax-topk", _DELTA)
_add("qwen3_vl_moe",
     _nested("Qwen3VLMoeConfig", "Qwen3VLMoeTextConfig", {"rope_parameters": _MROPE}, vision_config=_QWEN_VIT,
             **_MEDIA_IDS),
     "softmax-topk", auto="AutoModelForImageTextToText")
_add("qwen3_omni_moe",
     _nested("Qwen3OmniMoeThinkerConfig", "Qwen3OmniMoeTextConfig", {"rope_parameters": _MROPE},
             vision_config=_QWEN_VIT, audio_config=_AUDIO, **_MEDIA_IDS),
     "softmax-topk", auto="Qwen3OmniMoeThinkerForConditionalGeneration")
_add("qwen4_exp", "Qwen4ExpTextConfig", "softmax-topk", _DELTA, hc_count=2, hc_lowrank=8,
     layer_types=["linear_attention", "qwen_sparse_attention"], indexer_n_heads=2, indexer_kv_heads=1,
     indexer_head_dim=8, indexer_budget=64, indexer_compress_ratio=4)
_add("olmoe", "OlmoeConfig", "softmax-topk", _NARROW, num_experts_per_tok=3, norm_topk_prob=False)
_add("flex_olmo", "FlexOlmoConfig", "softmax-topk", _NARROW, norm_topk_prob=False)
_add("mellum", "MellumConfig", "softmax-topk", num_experts_per_tok=3)
_add("jamba", "JambaConfig", "softmax-topk", _NARROW, _MAMBA, num_hidden_layers=4, mamba_dt_rank=4,
     attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
     use_mamba_kernels=False)
_add("hunyuan_v1_moe", "HunYuanMoEV1Config", "softmax-topk", _NARROW, moe_topk=2)
_add("gemma4", "Gemma4TextConfig", "softmax-topk", _GEMMA, enable_moe_block=True,
     hidden_size_per_layer_input=8, vocab_size_per_layer_input=96)
_add("diffusion_gemma",
     _nested("DiffusionGemmaConfig", "DiffusionGemmaTextConfig", _GEMMA, canvas_length=4,
             vision_config=_VIT | {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16}),
     "softmax-topk", auto="DiffusionGemmaForBlockDiffusion", encoder_decoder=True)
_add("dbrx", "DbrxConfig", "softmax-topk", kind="variant", d_model=32, n_heads=4, n_layers=2, max_seq_len=64,
     attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
     ffn_config={"ffn_hidden_size": 24, "moe_num_experts": NUM_EXPERTS, "moe_top_k": 2})

# --- softmax, then top-k of the probabilities plus a bias
_add("ernie4_5_moe", "Ernie4_5_MoeConfig", "softmax-bias-topk", _ERNIE, moe_k=3)
_add("ernie4_5_vl_moe",
     _nested("Ernie4_5_VLMoeConfig", "Ernie4_5_VLMoeTextConfig", _ERNIE, _DENSE_FIRST_TYPES,
             {"moe_intermediate_size": [24, 16], "rope_parameters": _MROPE | {"mrope_section": [1, 1, 2]}},
             vision_config=_VIT | {"depth": 1}, **_MEDIA_IDS),
     "softmax-bias-topk", auto="AutoModelForImageTextToText")
_add("longcat_flash", "LongcatFlashConfig", "softmax-bias-topk", _MLA, kind="variant", num_layers=2,
     num_hidden_layers=4, ffn_hidden_size=48, expert_ffn_hidden_size=24, zero_expert_num=2, moe_topk=3)
_add("zaya", "ZayaConfig", "mlp-softmax-bias-skip", num_hidden_layers=3, num_experts_per_tok=1,
     router_hidden_size=16)

# --- softmax limited to the best groups
_add("deepseek_v2", "DeepseekV2Config", "softmax-group-limited", _MLA, _DENSE_FIRST,
     topk_method="group_limited_greedy")
_add("deepseek_ocr2",
     _nested("DeepseekOcr2Config", "DeepseekOcr2TextConfig", _DENSE_FIRST_TYPES,
             {"topk_method": "group_limited_greedy"}, vision_config=_OCR_VIT, **_MEDIA_IDS),
     "softmax-group-limited", auto="AutoModelForImageTextToText")
_add("mistral4", "Mistral4Config", "softmax-group-limited", _MLA, _DENSE_FIRST, auto="Mistral4ForCausalLM")

# --- top-k, then softmax
_add("gpt_oss", "GptOssConfig", "topk-softmax", _NARROW, kind="variant")
_add("openai_privacy_filter", "OpenAIPrivacyFilterConfig", "topk-softmax", _NARROW, kind="variant",
     num_labels=5, auto="AutoModelForTokenClassification")
_add("granitemoe", "GraniteMoeConfig", "topk-softmax", _NARROW)
_add("granitemoeshared", "GraniteMoeSharedConfig", "topk-softmax", _NARROW, shared_intermediate_size=40)
_add("granitemoe_swa", "GraniteMoeSWAConfig", "topk-softmax", _NARROW, shared_intermediate_size=40)
_add("granitemoehybrid", "GraniteMoeHybridConfig", "topk-softmax", _NARROW, _MAMBA, mamba_n_heads=8,
     mamba_d_head=8, mamba_chunk_size=8, layer_types=["linear_attention", "full_attention"],
     shared_intermediate_size=40)
_add("jetmoe", "JetMoeConfig", "topk-softmax", _NARROW, kind="variant", kv_channels=8)
_add("aria", "AriaTextConfig", "topk-softmax", _NARROW, kind="variant", auto="AriaTextForCausalLM",
     moe_num_experts=NUM_EXPERTS, moe_topk=2, moe_num_shared_experts=1)
_add("cohere2_moe", "Cohere2MoeConfig", "topk-softmax", _DENSE_FIRST_TYPES, _NARROW, logit_scale=1.0,
     prefix_dense_intermediate_size=48)

# --- sigmoid plus a bias, limited to the best groups
_add("deepseek_v3", "DeepseekV3Config", "sigmoid-bias-group-limited", _MLA, _DENSE_FIRST,
     num_experts_per_tok=3)
_add("deepseek_v32", "DeepseekV32Config", "sigmoid-bias-group-limited", _SPARSE_MLA, _DENSE_FIRST_TYPES)
_add("glm4_moe", "Glm4MoeConfig", "sigmoid-bias-group-limited", _DENSE_FIRST, num_experts_per_tok=3)
_add("glm4_moe_lite", "Glm4MoeLiteConfig", "sigmoid-bias-group-limited", _MLA, _DENSE_FIRST_TYPES)
_add("glm4v_moe",
     _nested("Glm4vMoeConfig", "Glm4vMoeTextConfig", _DENSE_FIRST,
             {"rope_parameters": _MROPE | {"partial_rotary_factor": 1.0}, "num_experts_per_tok": 3},
             vision_config=_GLM_VIT, **_MEDIA_IDS),
     "sigmoid-bias-group-limited", auto="AutoModelForImageTextToText")
_add("glm5_next",
     _nested("Glm5NextConfig", "Glm5NextTextConfig", _MLA, _DENSE_FIRST_TYPES, _KDA,
             {"qk_rope_head_dim": 0, "head_dim": 0, "indexer_types": ["full"] * 3, "index_kpool": 4,
              "layer_types": ["linear_attention", "deepseek_sparse_attention", "linear_attention"],
              "hc_mult": 2, "swiglu_limit": 0.5},
             vision_config=_GLM_VIT | {"projection_intermediate_size": 16}, **_MEDIA_IDS),
     "sigmoid-bias-group-limited", auto="AutoModelForImageTextToText")
_add("glm_moe_dsa", "GlmMoeDsaConfig", "sigmoid-bias-group-limited", _SPARSE_MLA, _DENSE_FIRST_TYPES)
_add("dots1", "Dots1Config", "sigmoid-bias-group-limited", _DENSE_FIRST)
_add("exaone_moe", "ExaoneMoeConfig", "sigmoid-bias-group-limited", _DENSE_FIRST)
_add("solar_open", "SolarOpenConfig", "sigmoid-bias-group-limited")
_add("mimo_v2_flash", "MiMoV2FlashConfig", "sigmoid-bias-group-limited", _DENSE_FIRST_TYPES, v_head_dim=8,
     layer_types=["full_attention", "sliding_attention", "full_attention"])
_add("nemotron_h", "NemotronHConfig", "sigmoid-bias-group-limited", kind="variant", use_mamba_kernels=False,
     layers_block_type=["linear_attention", "moe", "full_attention", "moe", "mlp"], ssm_state_size=8,
     mamba_num_heads=8, mamba_head_dim=8, n_groups=2, chunk_size=8, moe_shared_expert_intermediate_size=40,
     moe_latent_size=16)
_add("kimi_linear", "KimiLinearConfig", "sigmoid-bias-group-limited", _MLA, _DENSE_FIRST_TYPES, _KDA,
     layer_types=["linear_attention", "full_attention", "linear_attention"])
_add("axk1", "AXK1Config", "sigmoid-bias-group-limited", _MLA, _DENSE_FIRST)
_add("axk2", "AXK2Config", "sigmoid-bias-group-limited", _MLA, _DENSE_FIRST_TYPES, gated_norm_rank=8)
_add("hy_v4", "HYV4Config", "sigmoid-bias-group-limited", _MLA, _DENSE_FIRST_TYPES, swiglu_limit=0.5)

# --- sigmoid plus a bias
_add("minimax_m2", "MiniMaxM2Config", "sigmoid-bias", _NARROW, num_experts_per_tok=3)
_add("minimax_m3_vl", "MiniMaxM3VLTextConfig", "sigmoid-bias", _DENSE_FIRST_TYPES, _NARROW, rotary_dim=8,
     auto="MiniMaxM3VLForCausalLM", dense_intermediate_size=48, shared_intermediate_size=40, swiglu_limit=0.5)
_add("hy_v3", "HYV3Config", "sigmoid-bias", _DENSE_FIRST_TYPES)
_add("laguna", "LagunaConfig", "sigmoid-bias", _DENSE_FIRST_TYPES, moe_routed_scaling_factor=1.5,
     moe_router_logit_softcapping=4.0)
_add("lfm2_moe", "Lfm2MoeConfig", "sigmoid-bias", num_hidden_layers=3, num_dense_layers=1,
     layer_types=["conv", "full_attention", "conv"])
_add("afmoe", "AfmoeConfig", "sigmoid-bias", num_hidden_layers=3, num_dense_layers=1, route_scale=1.5)
_add("step3p7",
     _nested("Step3p7Config", "Step3p7TextConfig", _DENSE_FIRST_TYPES,
             {"share_expert_dim": 40, "moe_router_scaling_factor": 1.5, "swiglu_limits": [None, 0.5, None]},
             vision_config=_VIT | {"image_size": 28}, **_MEDIA_IDS),
     "sigmoid-bias", kind="variant", auto="AutoModelForImageTextToText")
_add("inkling", "InklingTextConfig", "sigmoid-bias-shared-sink", _DENSE_FIRST_TYPES,
     auto="InklingForCausalLM", n_shared_experts=2, route_scale=1.5, logits_mup_width_multiplier=1.0,
     swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=8, sliding_window_size=64, d_rel=8,
     rel_extent=64)

# --- other routers
_add("deepseek_v4", "DeepseekV4Config", "sqrtsoftplus-bias-hash", num_hidden_layers=3, head_dim=16,
     num_key_value_heads=1, mlp_layer_types=["hash_moe", "moe", "moe"], partial_rotary_factor=0.5,
     layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
     q_lora_rank=16, o_groups=2, o_lora_rank=8, hc_mult=2, swiglu_limit=0.5)
_add("phimoe", "PhimoeConfig", "sparsemixer", _NARROW)
_add("llama4", "Llama4TextConfig", "llama4-sigmoid", _NARROW, kind="variant", auto="Llama4ForCausalLM",
     num_hidden_layers=4, intermediate_size_mlp=48, interleave_moe_layer_step=2, num_experts_per_tok=1,
     no_rope_layer_interval=2)
_add("switch_transformers", "SwitchTransformersConfig", "top1-capacity", kind="moduledict",
     auto="AutoModelForSeq2SeqLM", encoder_decoder=True, d_model=32, d_kv=8, d_ff=24, num_heads=4,
     num_layers=2, num_decoder_layers=2, num_sparse_encoder_layers=2, num_sparse_decoder_layers=2,
     expert_capacity=4)
_add("nllb_moe", "NllbMoeConfig", "top2-capacity", kind="moduledict", auto="AutoModelForSeq2SeqLM",
     encoder_decoder=True, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
     decoder_attention_heads=4, encoder_ffn_dim=24, decoder_ffn_dim=24, encoder_sparse_step=1,
     decoder_sparse_step=1, decoder_start_token_id=2, moe_eval_capacity_token_fraction=0.25)
_add("fairseq_moe",
     lambda: FairseqMoeConfig(vocab_size=96, hidden_size=32, num_layers=4, num_heads=4, intermediate_size=24,
                              max_position_embeddings=64, num_experts=NUM_EXPERTS, pad_token_id=PAD_ID,
                              bos_token_id=1, eos_token_id=2),
     "top2-capacity", kind="moduledict")
# fmt: on


def build(name: str, seed: int = 0) -> PreTrainedModel:
    """Build the family's model in fp32 and eval mode; the same seed gives the same weights."""
    family = FAMILIES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        make = getattr(family.auto, "from_config", family.auto)  # Auto classes are not constructors
        model: PreTrainedModel = make(family.config())
    _redraw(model, torch.Generator().manual_seed(seed))
    return model.eval()


def without_capacity(model: PreTrainedModel) -> PreTrainedModel:
    """A compact Switch layer has no capacity limit unless it is asked for: what it is compared with has none either."""
    for module in model.modules():
        if hasattr(module, "expert_capacity"):
            module.expert_capacity = 1000
    return model


def _redraw(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Replace the tiny default init, under which experts hardly differ and all biases are zero."""
    embedding = model.get_input_embeddings().weight

    def noise(like: Tensor, std: float) -> Tensor:
        return std * torch.randn(like.shape, generator=generator)

    with torch.no_grad():
        for key, param in model.named_parameters():
            if param.dim() < 2 or "correction_bias" in key:
                param.add_(noise(param, 0.1))  # norms stay near 1, biases leave 0
            elif param is embedding:
                param.copy_(noise(param, 0.5))  # tokens must differ, or they all choose the same experts
            elif "router_mlp" in key:
                param.copy_(noise(param, 0.8))  # Zaya's router is several layers deep: 0.2 would fade out
            else:
                param.copy_(noise(param, 0.2))
        for key, buffer in model.named_buffers():
            if key.endswith("balancing_biases"):
                buffer.copy_(noise(buffer, 0.1))  # Zaya's own -1 for "skip the experts" would never be chosen
            elif key.endswith("tid2eid"):
                # DeepSeek-V4's table from token id to experts: distinct experts in each row.
                order = torch.rand(buffer.shape[0], NUM_EXPERTS, generator=generator).argsort(-1)
                buffer.copy_(order[:, : buffer.shape[1]])
            elif "bias" in key and buffer.is_floating_point():
                buffer.add_(noise(buffer, 0.1))


def batch(model: PreTrainedModel, name: str, seed: int = 0, batch: int = 2, length: int = 9) -> dict[str, Tensor]:
    """Random arguments for `model(**...)`; the last row is padded on the right."""
    generator = torch.Generator().manual_seed(seed)

    def ids(width: int) -> Tensor:
        return torch.randint(TEXT_IDS.start, TEXT_IDS.stop, (batch, width), generator=generator)

    out = {"input_ids": ids(length), "attention_mask": torch.ones(batch, length, dtype=torch.long)}
    if batch > 1:
        padding = slice(length - length // 3, None)
        out["attention_mask"][-1, padding] = 0
        out["input_ids"][-1, padding] = PAD_ID
    if FAMILIES[name].encoder_decoder:
        out["decoder_input_ids"] = ids(length - 2)
    return {key: value.to(model.device) for key, value in out.items()}
