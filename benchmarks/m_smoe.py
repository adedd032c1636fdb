"""M-SMoE on the small trained models, beside the reference rows.

    python benchmarks/m_smoe.py [--fixtures ../shared] [--only qwen|switch]

Writes benchmarks/results/m_smoe.json. Reference: the M-SMoE rows of the fixtures' peers-measured.md, made on the same
calibration and validation windows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import moepress
from moepress.checkpoint.load import load_model, load_tokenizer
from moepress.data.examples import task_examples
from moepress.data.windows import read_windows
from moepress.evaluation import compare, task_metrics

RESULTS = Path(__file__).parent / "results" / "m_smoe.json"
REFERENCE = {
    ("qwen3moe-tiny", 24, "compact"): 0.0777,
    ("qwen3moe-tiny", 24, "vanilla"): 0.0887,
    ("qwen3moe-tiny", 16, "compact"): 0.403,
    ("qwen3moe-tiny", 16, "vanilla"): 0.432,
    ("switch-tiny-sst2", 4, "compact"): 0.0077,
}
LIMIT = 1.05


def qwen(fixtures: Path) -> list[dict[str, Any]]:
    source = fixtures / "models" / "qwen3moe-tiny"
    windows = read_windows(fixtures / "data" / "windows-8k" / "validation.safetensors")
    original = load_model(source)
    rows, statistics_ = [], None
    for keep in (24, 16):
        for form in ("compact", "vanilla"):
            start = time.perf_counter()
            result = moepress.compress(
                load_model(source),
                calibration=str(fixtures / "data" / "windows-8k" / "calibration.safetensors"),
                statistics=statistics_,
                method="m-smoe",
                keep=keep,
                format=form,
                **{"plan.budget": "uniform", "calibration.samples": "all", "precision": "float32"},
            )
            statistics_ = result.outcome.statistics
            seconds = time.perf_counter() - start
            score = compare(result.model, original, windows)
            rows.append(row("qwen3moe-tiny", keep, form, [score.kl], seconds, score.to_dict() | result.after.to_dict()))
    return rows


def switch(fixtures: Path) -> list[dict[str, Any]]:
    source = fixtures / "models" / "switch-tiny-sst2"
    tasks = fixtures / "data" / "tasks"
    original, tokenizer = load_model(source), load_tokenizer(source)
    task, examples = task_examples("sst2", "validation", tasks)
    kls, accuracies, start = [], [], time.perf_counter()
    for seed in range(3):
        result = moepress.compress(
            load_model(source),
            tokenizer=tokenizer,
            calibration=f"task:sst2@{tasks}",
            method="m-smoe",
            keep=4,
            seed=seed,
            precision="float32",
        )
        score = task_metrics(result.model, task, examples, original, tokenizer=tokenizer)
        kls.append(score.kl)
        accuracies.append(score.accuracy)
    seconds = time.perf_counter() - start
    return [row("switch-tiny-sst2", 4, "compact", kls, seconds, {"accuracy": accuracies})]


def row(model: str, keep: int, form: str, kls: list[float], seconds: float, more: dict[str, Any]) -> dict[str, Any]:
    reference = REFERENCE[model, keep, form]
    mean = statistics.fmean(kls)
    made = {
        "model": model,
        "keep": keep,
        "format": form,
        "kl": mean,
        "kl_by_seed": kls,
        "reference_kl": reference,
        "ratio": mean / reference,
        "holds": mean <= LIMIT * reference,
        "seconds": seconds,
        "detail": more,
    }
    print(f"{model:18} keep {keep:2} {form:8} KL {mean:.4f}  reference {reference:.4f}  ratio {mean / reference:.3f}")
    return made


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixtures", type=Path, default=Path("../shared"))
    parser.add_argument("--only", choices=("qwen", "switch"))
    given = parser.parse_args()
    made = [] if given.only == "switch" else qwen(given.fixtures)
    made += [] if given.only == "qwen" else switch(given.fixtures)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(
        json.dumps({"command": "python benchmarks/m_smoe.py", "moepress": moepress.__version__, "rows": made}, indent=1)
        + "\n"
    )
