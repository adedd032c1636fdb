"""Decomposed experts on the small trained models: KL to the original, one option changed at a time, no training.

    python benchmarks/decompose.py [--fixtures ../shared] [--model qwen3moe-tiny|switch-tiny] [--windows 6]

Writes benchmarks/results/cpu/decompose_MODEL.json and .md. The KL is over the first `--windows` validation windows of
each domain; the calibration text is the first `--samples` calibration windows, spread over the domains.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import moepress
from moepress.checkpoint.load import load_model
from moepress.checkpoint.sizes import sizes_of
from moepress.data import window_batches
from moepress.data.windows import read_windows
from moepress.evaluation import compare
from moepress.pipeline import press
from moepress.recipe import make_recipe

RESULTS = Path(__file__).parent / "results" / "cpu"
KEEP = {"qwen3moe-tiny": 24, "switch-tiny": 8}
VARIANTS: dict[str, dict[str, Any]] = {
    "m-smoe, not decomposed": {"method": "m-smoe"},
    "mc-smoe": {},
    "plain SVD": {"decompose.whiten": False},
    "mean of a column": {"decompose.reduce": "mean"},
    "all batches alike": {"decompose.smoothing": None},
    "rows": {"decompose.along": "rows"},
    "preset paper": {"preset": "paper"},
    "preset paper_code": {"preset": "paper_code"},
    "ratio 0": {"decompose.ratio": 0.0},
    "ratio 0, plain SVD": {"decompose.ratio": 0.0, "decompose.whiten": False},
    "ratio 0.3": {"decompose.ratio": 0.3},
    "ratio 0.3, plain SVD": {"decompose.ratio": 0.3, "decompose.whiten": False},
    "c-smoe": {"method": "c-smoe"},
    "c-smoe, plain SVD": {"method": "c-smoe", "decompose.whiten": False},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixtures", type=Path, default=Path("../shared"))
    parser.add_argument("--model", choices=KEEP, default="qwen3moe-tiny")
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--only", help="variants whose name contains this")
    given = parser.parse_args()
    source = given.fixtures / "models" / given.model
    windows = given.fixtures / "data" / "windows-8k"
    original = load_model(source)
    validation = {d: ids[: given.windows] for d, ids in read_windows(windows / "validation.safetensors").items()}
    calibration = read_windows(windows / "calibration.safetensors")
    share = -(-given.samples // len(calibration))
    text = {domain: ids[:share] for domain, ids in calibration.items()}
    held = window_batches(validation, original.config, batch_size=4)
    rows, statistics = [], None
    for name, options in VARIANTS.items():
        if given.only and given.only not in name:
            continue
        model = load_model(source)
        options = {"method": "mc-smoe", "precision": "float32"} | options
        options |= {} if options["method"] == "c-smoe" else {"keep": KEEP[given.model]}
        start = time.perf_counter()
        batches = window_batches(text, model.config, batch_size=4)
        outcome = press(model, make_recipe(options), lambda batches=batches: batches, statistics=statistics)
        statistics = outcome.statistics if outcome.statistics.layers else statistics
        seconds = time.perf_counter() - start
        kl = compare(model, original, held).kl
        rows.append(
            {
                "variant": name,
                "options": options,
                "kl": kl,
                "expert_bytes": sizes_of(model).expert_bytes,
                "expert_bytes_before": sizes_of(original).expert_bytes,
                "seconds": round(seconds, 1),
            }
        )
        print(
            f"{name:26} KL {kl:.4f}  experts {sizes_of(model).expert_bytes / 1e6:.2f} MB  {seconds:.0f} s", flush=True
        )
    if not given.only:
        write(given, rows)


def write(given: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    command = (
        f"python benchmarks/decompose.py --model {given.model} --windows {given.windows} --samples {given.samples}"
    )
    RESULTS.mkdir(parents=True, exist_ok=True)
    content = {"command": command, "moepress": moepress.__version__, "rows": rows}
    (RESULTS / f"decompose_{given.model}.json").write_text(json.dumps(content, indent=1) + "\n")
    lines = [f"`{command}`", "", "| variant | KL | expert weights, of the original's |", "|---|---|---|"]
    lines += [f"| {r['variant']} | {r['kl']:.4f} | {r['expert_bytes'] / r['expert_bytes_before']:.1%} |" for r in rows]
    (RESULTS / f"decompose_{given.model}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
