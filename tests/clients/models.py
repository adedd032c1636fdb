"""Small models with the sizes that other engines want, and vanilla exports of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

import moepress

ASSETS = Path(moepress.__file__).parent / "assets"
DEMO = ASSETS / "demo-moe"
PROMPTS = [[350, 1207, 4096, 17 * 64, 771, 8000, 204], [5151, 333]]
NEW = 12

# Heads of 64 for vLLM, rows of whole 32s for GGUF, the demonstration's vocabulary for its tokenizer. The weights are
# drawn ten times wider than usual: otherwise all tokens are nearly as likely, and experts nearly alike.
_COMMON: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": (
        "MixtralConfig",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64, "num_key_value_heads": 1},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "intermediate_size": 128}
        | {"num_key_value_heads": 1, "head_dim": 64}
        | {"norm_topk_prob": True},  # as in all published ones: llama.cpp does so without asking
    ),
    "olmoe": (
        "OlmoeConfig",
        {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 64, "num_key_value_heads": 2},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}
        | {"first_k_dense_replace": 1}
        | {"num_hidden_layers": 3, "moe_intermediate_size": 64, "intermediate_size": 128, "num_key_value_heads": 2}
        | {"q_lora_rank": 64, "kv_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}
        | {"routed_scaling_factor": 1.5}
        # as in published ones: other engines ask for these, transformers does not
        | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    ),
}

METHODS = {"mixtral": "m-smoe", "qwen3_moe": "prune-refit", "olmoe": "ream", "deepseek_v3": "reap-all"}
"""Of each family's export: merged, refitted and pruned experts."""


def small(family: str, seed: int = 0) -> PreTrainedModel:
    """A random model of 8 experts per layer."""
    name, own = _CONFIGS[family]
    config = getattr(transformers, name)(**_COMMON | own)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for key, tensor in model.state_dict().items():
            if key.endswith("e_score_correction_bias"):  # drawn as zeros, and then it would not matter
                tensor.normal_(std=0.1)
    return model.eval()


def write_small(family: str, folder: Path) -> Path:
    """The random model as a checkpoint, with the demonstration's tokenizer."""
    small(family).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(DEMO).save_pretrained(folder)
    return folder


def greedy(model: PreTrainedModel, prompts: list[list[int]] = PROMPTS, new: int = NEW) -> list[list[int]]:
    """What a model in memory generates, in float32."""
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.float().generate(  # type: ignore[operator]
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers
