"""llm-compressor: quantises a checkpoint's linear layers to 4 bits by its GPTQ recipe, saves, loads and compares.

Reads a job: the folder, calibration windows, held-out windows, where the result goes. Writes the KL to the folder's own
model, the packed experts that the result holds, and its size.
"""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

torch.set_num_threads(1)
job = json.load(sys.stdin)
folder, out = job["folder"], Path(job["out"])


def load(place, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(place, dtype=dtype).eval()


def log_probabilities(model):
    with torch.no_grad():
        return torch.cat([model(torch.tensor([ids])).logits[0].float().log_softmax(-1) for ids in job["held_out"]])


expected = log_probabilities(load(folder))
windows = Dataset.from_list([{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in job["windows"]])
oneshot(
    model=load(folder, "auto"),
    tokenizer=AutoTokenizer.from_pretrained(folder),
    dataset=windows,
    recipe=GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head", "re:.*mlp.gate$"]),
    max_seq_length=max(map(len, job["windows"])),
    num_calibration_samples=len(job["windows"]),
    output_dir=str(out),
)
found = log_probabilities(load(out))
kl = (expected.exp() * (expected - found)).sum(-1).mean()
packed = []
for file in out.glob("*.safetensors"):
    with safe_open(file, "pt") as tensors:
        names = tensors.keys()  # it is no dict
        packed += [name for name in names if ".experts." in name and name.endswith("weight_packed")]
size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
Path(job["result"]).write_text(json.dumps({"kl": float(kl), "packed": sorted(packed), "bytes": size}))
