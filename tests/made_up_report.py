"""Records of a compression that never was: as many layers and experts as one likes, without a model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

from moepress.observe import STATISTICS, Statistics
from moepress.observe.statistic import LayerShape
from moepress.plan import Group, LayerPlan, Plan
from moepress.recipe import make_recipe
from moepress.report import SIMILARITY


def make_records(folder: Path, layers: int, experts: int, seed: int = 0) -> Path:
    """Half of the experts merged into the other half, in all layers, with every value that a report can show."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    names = [f"model.layers.{i}.mlp" for i in range(layers)]
    plans, statistics, similarity = [], {}, {}
    for name in names:
        order = random.permutation(experts)
        leaders, others = order[: experts // 2], order[experts // 2 :]
        led = random.integers(len(leaders), size=len(others))
        groups = []
        for place, leader in enumerate(leaders):
            members = [int(leader), *map(int, others[led == place])]
            weights = random.dirichlet(np.ones(len(members)))
            groups.append(Group(leader=int(leader), members=tuple(members), weights=tuple(weights.tolist())))
        plans.append(LayerPlan(name=name, experts=experts, router="redirect", groups=tuple(groups)))
        usage = STATISTICS.create("usage", shape=LayerShape(experts=experts, width=8, hidden_units=8))
        usage.sums["count"] = torch.from_numpy(random.gamma(0.5, 1000, experts).round())
        statistics[name] = {"usage": usage}
        x_EH = random.normal(size=(experts, 32))
        x_EH /= np.linalg.norm(x_EH, axis=1, keepdims=True)
        similarity[name] = (x_EH @ x_EH.T).astype(np.float32)
    Plan(layers=tuple(plans)).save(folder / "plan.json")
    Statistics(statistics).save(folder / "statistics")
    save_file(similarity, folder / SIMILARITY)
    make_recipe({"method": "m-smoe", "keep": 0.5, "calibration.source": "text.jsonl"}).save(folder / "recipe.yaml")
    sizes = ["parameters", "bytes", "expert_parameters", "expert_bytes", "other_parameters", "other_bytes"]
    rank = random.uniform(2, 20, size=(layers, experts))
    summary = {
        "moepress": "0.0",
        "model": "made-up",
        "method": "m-smoe",
        "format": "compact",
        "before": dict(zip(sizes, [9e9, 18e9, 8e9, 16e9, 1e9, 2e9], strict=True)),
        "after": dict(zip(sizes, [5e9, 10e9, 4e9, 8e9, 1e9, 2e9], strict=True)),
        "worst_alignment_gap": 1e-5,
        "alignment_gap": dict.fromkeys(names, 1e-5),
        "output_error": dict(zip(names, random.uniform(0, 0.2, layers), strict=True)),
        "stable_rank": {
            name: {"before": own.tolist(), "after": (own / 2).tolist()} for name, own in zip(names, rank, strict=True)
        },
        "remaining": {name: random.uniform(0.1, 0.5, experts // 2).tolist() for name in names},
        "alignments": {"auction": layers * experts // 2},
        "seconds": {"observe": 100.0, "merge": 1000.0},
        "versions": {"torch": "0"},
    }
    (folder / "report.json").write_text(json.dumps(summary))
    return folder
