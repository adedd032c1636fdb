"""Train a small MoE from scratch, in a layout and with a routing that the other fixtures do not have.

    python benchmarks/train_small_moe.py LAYOUT --corpus FOLDER --tokenizer FOLDER --out FOLDER --minutes 4

LAYOUT: `olmoe` (64 experts top-8), `deepseek` (shared expert, sigmoid + bias, groups), `balanced` (Qwen3-MoE,
16 experts top-4, strong load balancing), for a GPU; `olmoe-small` and `deepseek-small` are a third as large, for an
hour on one CPU core (`--device cpu --batch 12 --minutes 75 --embeddings demo-moe`). FOLDER of the corpus: *.jsonl.xz
with `text`, `domain`, `split`.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
import transformers as tr

LENGTH = 512
COMMON = dict(
    vocab_size=8192, hidden_size=192, num_attention_heads=3, num_key_value_heads=3, max_position_embeddings=1024,
    tie_word_embeddings=True, pad_token_id=0, bos_token_id=None, eos_token_id=1, use_cache=True,
)  # fmt: skip
SMALL = COMMON | dict(hidden_size=128, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=4)
LAYOUTS = {
    "olmoe": lambda: tr.OlmoeConfig(
        **COMMON, num_hidden_layers=5, intermediate_size=48, num_experts=64, num_experts_per_tok=8,
        norm_topk_prob=False, router_aux_loss_coef=0.001, output_router_logits=True,
    ),
    "deepseek": lambda: tr.DeepseekV3Config(
        **COMMON, num_hidden_layers=5, intermediate_size=512, moe_intermediate_size=96, n_routed_experts=32,
        num_experts_per_tok=4, n_shared_experts=1, n_group=4, topk_group=2, first_k_dense_replace=1,
        norm_topk_prob=True, routed_scaling_factor=1.0, kv_lora_rank=64, q_lora_rank=96, qk_nope_head_dim=32,
        qk_rope_head_dim=32, v_head_dim=64,
    ),
    "balanced": lambda: tr.Qwen3MoeConfig(
        **COMMON, num_hidden_layers=5, intermediate_size=512, moe_intermediate_size=128, num_experts=16,
        num_experts_per_tok=4, norm_topk_prob=True, head_dim=64, router_aux_loss_coef=0.02, output_router_logits=True,
    ),
    "olmoe-small": lambda: tr.OlmoeConfig(
        **SMALL, intermediate_size=24, num_experts=64, num_experts_per_tok=8,
        norm_topk_prob=False, router_aux_loss_coef=0.001, output_router_logits=True,
    ),
    "deepseek-small": lambda: tr.DeepseekV3Config(
        **SMALL, intermediate_size=384, moe_intermediate_size=48, n_routed_experts=32,
        num_experts_per_tok=4, n_shared_experts=1, n_group=4, topk_group=2, first_k_dense_replace=1,
        norm_topk_prob=True, routed_scaling_factor=1.0, kv_lora_rank=64, q_lora_rank=64, qk_nope_head_dim=32,
        qk_rope_head_dim=32, v_head_dim=64,
    ),
}  # fmt: skip


def tokenise(job: tuple[str, str]) -> tuple[str, np.ndarray, np.ndarray]:
    """One corpus file as two streams of token ids: train and validation."""
    path, folder = job
    tokenizer = tr.AutoTokenizer.from_pretrained(folder)
    ids: dict[str, list[int]] = {"train": [], "validation": []}
    with lzma.open(path, "rt") as lines:
        texts: dict[str, list[str]] = {"train": [], "validation": []}
        for line in lines:
            record = json.loads(line)
            texts[record["split"]].append(record["text"])
    for split, documents in texts.items():
        for start in range(0, len(documents), 256):
            for row in tokenizer(documents[start : start + 256], add_special_tokens=False)["input_ids"]:
                ids[split] += [*row, 1]
    return Path(path).name.split(".")[0], np.array(ids["train"], np.uint16), np.array(ids["validation"], np.uint16)


def load_corpus(corpus: Path, tokenizer: Path, cache: Path) -> dict[str, dict[str, np.ndarray]]:
    if not cache.exists():
        cache.mkdir(parents=True)
        jobs = [(str(path), str(tokenizer)) for path in sorted(corpus.glob("*.jsonl.xz"))]
        with ProcessPoolExecutor(len(jobs)) as pool:
            for domain, train, validation in pool.map(tokenise, jobs):
                np.save(cache / f"{domain}.train.npy", train)
                np.save(cache / f"{domain}.validation.npy", validation)
    found: dict[str, dict[str, np.ndarray]] = {"train": {}, "validation": {}}
    for path in sorted(cache.glob("*.npy")):
        domain, split, _ = path.name.split(".")
        found[split][domain] = np.load(path)
    return found


def sample(streams: dict[str, np.ndarray], batch: int, draw: np.random.Generator) -> torch.Tensor:
    """Windows from all domains alike, whatever their size."""
    names = list(streams)
    rows = []
    for i in draw.integers(len(names), size=batch):
        stream = streams[names[i]]
        start = draw.integers(len(stream) - LENGTH)
        rows.append(stream[start : start + LENGTH].astype(np.int64))
    return torch.from_numpy(np.stack(rows))


def balance_by_bias(model: torch.nn.Module, counts: dict[int, torch.Tensor], step_size: float = 1e-3) -> None:
    """DeepSeek's own balancing: the selection bias of overloaded experts goes down, of idle ones up."""
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias") and id(module) in counts:
            load = counts[id(module)]
            module.e_score_correction_bias += step_size * torch.sign(load.mean() - load)


def train(
    layout: str,
    corpus: dict[str, dict[str, np.ndarray]],
    out: Path,
    minutes: float,
    batch: int,
    lr: float,
    device: str,
    embeddings: Path | None,
) -> None:
    torch.manual_seed(0)
    draw = np.random.default_rng(0)
    model = tr.AutoModelForCausalLM.from_config(LAYOUTS[layout]()).to(device)
    if embeddings is not None:
        trained = tr.AutoModelForCausalLM.from_pretrained(embeddings).get_input_embeddings().weight
        model.get_input_embeddings().weight.data.copy_(trained.float())
    if device == "cpu":  # experts in a loop: the grouped product that is the default copies whole tensors there
        model.set_experts_implementation("eager")
    print(layout, f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    counts: dict[int, torch.Tensor] = {}

    def count(module: torch.nn.Module, _: tuple, output: tuple) -> None:
        index = next(o for o in output if o.dtype == torch.int64)
        counts[id(module)] = torch.bincount(index.flatten(), minlength=module.num_experts).float()

    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.register_forward_hook(count)
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [dict(params=decay, weight_decay=0.1), dict(params=rest, weight_decay=0.0)],
        lr=lr,
        betas=(0.9, 0.95),
        fused=True,
    )
    autocast = torch.autocast(device, dtype=torch.bfloat16, enabled=device != "cpu")
    start, step = time.time(), 0
    while (elapsed := time.time() - start) < minutes * 60:
        progress = elapsed / (minutes * 60)
        rate = lr * min(1, step / 200) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids = sample(corpus["train"], batch, draw).to(device, non_blocking=True)
        with autocast:
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        balance_by_bias(model, counts)
        step += 1
        if step % 50 == 0:
            print(layout, step, f"{elapsed:.0f} s", f"loss {loss.item():.3f}", flush=True)
    model.config.output_router_logits = False
    model = model.to(torch.bfloat16).eval()
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out, max_shard_size="15MB")
    scores = {}
    draw = np.random.default_rng(1)
    with torch.no_grad():
        for domain, stream in corpus["validation"].items():
            ids = sample({domain: stream}, 32, draw).to(device)
            scores[domain] = math.exp(model.float()(input_ids=ids, labels=ids).loss.item())
    tokens = step * batch * LENGTH
    record = dict(layout=layout, steps=step, tokens=tokens, minutes=minutes, validation_perplexity=scores)
    (out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    print(record, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layout", choices=LAYOUTS)
    for name in ("corpus", "tokenizer", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=Path("/tmp/tokens"))
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--embeddings", type=Path, help="a trained model of the same width to take them from")
    given = parser.parse_args()
    data = load_corpus(given.corpus, given.tokenizer, given.cache)
    train(given.layout, data, given.out, given.minutes, given.batch, given.lr, given.device, given.embeddings)
