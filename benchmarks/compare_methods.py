"""Methods side by side on one model: KL to the original on held-out windows, size, time.

    python benchmarks/compare_methods.py MODEL --windows FOLDER [--keep 0.75 0.5] [--device cuda] [-o FILE.json]

FOLDER holds calibration.safetensors and validation.safetensors, windows of token ids (by domain in the latter).
Weights are compressed and stored in the model's own precision and evaluated in float32.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

import moepress
from moepress.checkpoint.load import load_model
from moepress.data.windows import read_windows
from moepress.evaluation import compare

LEAST_SQUARES = "least-squares"
CANDIDATES: dict[str, dict[str, Any]] = {
    "auto": {"method": "auto"},
    "auto, overall": {"method": "auto", "plan.budget": "overall"},
    "elimination": {"method": "prune-refit", "plan.saliency": "elimination"},
    "frequency-pruning": {"method": "frequency-pruning"},
    "reap": {"method": "reap"},
    "reap-all": {"method": "reap-all"},
    **{
        f"{name}, uniform": {"method": method, "plan.budget": "uniform", **options}
        for name, method, options in (
            ("averaging", "averaging", {}),
            ("git-rebasin", "git-rebasin", {}),
            ("activation-matching", "git-rebasin", {"align.method": "activation-matching"}),
            ("repair", "repair", {}),
            ("zipit", "zipit", {}),
            ("fisher", "fisher", {}),
            ("repair by frequency", "repair", {"merge.operator": {"name": "repair", "weighted": "frequency"}}),
            ("zipit by frequency", "zipit", {"merge.operator": {"name": "zipit", "weighted": "frequency"}}),
            ("fisher by frequency", "fisher", {"merge.operator": {"name": "fisher", "weighted": "frequency"}}),
            ("expert-gradient", "m-smoe", {"plan.similarity": "expert-gradient", "align.reference": "first"}),
        )
    },
    **{
        f"{method}, random groups": {"method": method, "preset": "paper-baselines"}
        for method in ("averaging", "git-rebasin", "repair", "zipit")
    },
    "frequency-pruning, adaptive": {"method": "frequency-pruning", "preset": "paper"},
    "task-specific": {"method": "task-specific"},
    "m-smoe, uniform, rows": {"method": "m-smoe", "plan.budget": "uniform", "router": "keep"},
    "m-smoe, uniform, redirect": {"method": "m-smoe", "plan.budget": "uniform"},
    "m-smoe": {"method": "m-smoe"},
    "hc-smoe, redirect": {"method": "hc-smoe"},
    "hc-smoe, rows": {"method": "hc-smoe", "router": "keep"},
    "hc-smoe, rows, paper": {"method": "hc-smoe", "router": "keep", "preset": "paper"},
    "ream": {"method": "ream"},
    "ream, paper": {"method": "ream", "preset": "paper"},
    "merge-moe, uniform, rows": {"method": "merge-moe", "plan.budget": "uniform", "router": "keep"},
    "merge-moe, uniform, rows, mass": {
        "method": "merge-moe",
        "plan.budget": "uniform",
        "router": "keep",
        "refit.router": "mass",
    },
    "merge-moe, uniform, redirect": {"method": "merge-moe", "plan.budget": "uniform"},
    "prune-refit": {"method": "prune-refit"},
    "prune-refit, layer target": {
        "method": "prune-refit",
        "refit.method": {"name": LEAST_SQUARES, "target": "layer"},
    },
    "prune-refit, energy": {"method": "prune-refit", "plan.saliency": "output-energy"},
    "prune-refit, reap": {"method": "prune-refit", "plan.saliency": "reap"},
}


def measure(model: Path, windows: Path, keep: float, options: dict[str, Any], device: str, validation: Any) -> dict:
    original = load_model(model, device=device)
    start = time.perf_counter()
    result = moepress.compress(
        load_model(model, device=device),
        calibration=str(windows / "calibration.safetensors"),
        keep=keep,
        **{"precision": "float32", "calibration.samples": "all", "calibration.batch_size": 16, **options},
    )
    seconds = time.perf_counter() - start
    score = compare(result.model, original, validation)
    return {
        "keep": keep,
        "kl": score.kl,
        "perplexity": score.model.perplexity,
        "agreement": score.agreement,
        "seconds": seconds,
        "parameters": result.after.parameters,
        "experts": {layer.name: layer.physical for layer in result.outcome.plan.layers},
        "kl_by_domain": {name: domain.kl for name, domain in score.domains.items()},
    }


def save(out: Path, model: Path, device: str, rows: list[dict[str, Any]]) -> None:
    machine = torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"
    command = f"python benchmarks/compare_methods.py {model.name} --windows windows-8k --device {device}"
    if len({row["method"] for row in rows}) < len(CANDIDATES):
        command += " --only " + " ".join(f'"{name}"' for name in dict.fromkeys(row["method"] for row in rows))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"command": command, "machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--windows", type=Path, required=True)
    parser.add_argument("--keep", type=float, nargs="+", default=[0.75, 0.5])
    parser.add_argument("--only", nargs="+", choices=CANDIDATES, default=list(CANDIDATES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("-o", "--out", type=Path)
    given = parser.parse_args()
    validation = read_windows(given.windows / "validation.safetensors")
    rows: list[dict[str, Any]] = []
    for keep in given.keep:
        for name in given.only:
            row = measure(given.model, given.windows, keep, CANDIDATES[name], given.device, validation)
            rows.append({"method": name, **row})
            print(
                f"{given.model.name} keep {keep}: {name:26} KL {row['kl']:.4f}  ppl {row['perplexity']:.2f}"
                f"  agree {row['agreement']:.3f}  {row['seconds']:.1f} s",
                flush=True,
            )
            if given.out:  # after each, so that an interrupted run leaves what it had
                save(given.out, given.model, given.device, rows)
