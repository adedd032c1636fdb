"""Stock transformers, which knows nothing of moepress: reads a job, loads each folder, writes what it generates."""

import json
import sys

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

logging.set_verbosity_error()
torch.set_num_threads(1)
job = json.load(sys.stdin)
answers = []
for folder in job["folders"]:
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    answers.append([])
    for prompt in job["prompts"]:
        ids = torch.tensor([prompt])
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=job["new"],
            min_new_tokens=job["new"],
            do_sample=False,
        )
        answers[-1].append(out[0, len(prompt) :].tolist())
assert "moepress" not in sys.modules
json.dump(answers, sys.stdout)
