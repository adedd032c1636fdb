"""Tables that need no weights: the paper's models, and the settings of its experiments beside those here."""

from __future__ import annotations

from typing import Any

import torch

from moepress.bench.results import Table
from moepress.checkpoint.sizes import sizes_of
from moepress.data.batches import CalibrationData
from moepress.decompose.schedule import COOLDOWN, STEPS, WARMUP
from moepress.finetuning import PAPER_GRID
from moepress.methods import METHODS
from moepress.paper.models import MODELS, layers_of, on_meta
from moepress.recovery.options import BETAS, EPSILON, RecoverOptions

CARD = {
    "t5-base": ("220M", "220M", "12", "768", "1", "enc-dec"),
    "switch-base-32": ("220M", "2.0B", "12", "768", "32", "enc-dec"),
    "fairseq-dense-125m": ("125M", "125M", "12", "768", "1", "dec"),
    "fairseq-moe-15b": ("125M", "15B", "12", "768", "512", "dec"),
}
"""As printed: act-size, size, l, h, e, arch."""
COLUMNS = ("act-size", "size", "l", "h", "e", "arch")


def model_card() -> list[dict[str, Any]]:
    """A row for each of the paper's models, counted on the meta device."""
    return [{"model": name, **card(name), "paper": dict(zip(COLUMNS, CARD[name], strict=True))} for name in MODELS]


def card(name: str) -> dict[str, Any]:
    model = on_meta(MODELS[name], torch.bfloat16)
    layers, config = layers_of(model), model.config
    size = sizes_of(model).parameters
    idle = 0
    for layer in layers:
        experts = sum(tensor.numel() for tensor in layer.bank.tensors().values())
        idle += experts // layer.num_experts * (layer.num_experts - layer.router.top_k)
    return {
        "act-size": size - idle,
        "size": size,
        "l": config.num_hidden_layers,
        "h": config.hidden_size,
        "e": layers[0].num_experts if layers else 1,
        "arch": "enc-dec" if config.is_encoder_decoder else "dec",
    }


def card_table(rows: list[dict[str, Any]]) -> Table:
    def shown(row: dict[str, Any], column: str) -> str:
        value = row[column]
        return f"{value / 1e6:,.1f} M" if column.endswith("size") else str(value)

    head = ["model", *(cell for column in COLUMNS for cell in (column, f"paper: {column}"))]
    cells = [[row["model"], *(c for x in COLUMNS for c in (shown(row, x), row["paper"][x]))] for row in rows]
    note = (
        "act-size: the parameters that one token meets, all experts of its layers that it does not choose left out. "
        "Each token of fairseq-moe-15b chooses two experts; the paper counts one."
    )
    return Table("Models", head, cells, note)


def hyper_parameters() -> list[dict[str, str]]:
    options, decompose = RecoverOptions(objective="task"), METHODS.get("mc-smoe").defaults
    grid = "; ".join(f"{name} {', '.join(f'{value:g}' for value in values)}" for name, values in PAPER_GRID.items())
    printed = "lr 0.0003, 0.0001, 3e-05, 1e-05; batch_size 8, 16, 32, 64; epochs 3, 5, 10, 20"
    rows = [
        ("optimizer", "AdamW", "AdamW"),
        ("Adam ε", f"{EPSILON:g}", "1e-06"),
        ("Adam β", ", ".join(map(str, BETAS)), "0.9, 0.98"),
        ("warm-up steps", str(options.warmup), "16"),
        ("weight decay", str(options.weight_decay), "0.01"),
        ("learning rate", "linear decay", "linear decay"),
        ("searched, for each task", grid, printed),
        ("distillation α", str(options.alpha), "0.2"),
        ("distillation T", str(options.softening), "2.0"),
        ("calibration samples", str(CalibrationData().samples), "256"),
        ("rank", str(decompose["decompose.rank"]), "32"),
        ("share of S that stays", str(decompose["decompose.ratio"]), "0.1"),
        ("T, T_i, T_f of the schedule", f"{STEPS}, {WARMUP}, {COOLDOWN}", "10000, 400, 1600"),
    ]
    return [{"what": what, "here": here, "paper": paper} for what, here, paper in rows]


def hyper_table(rows: list[dict[str, str]]) -> Table:
    note = "Here: the defaults. The schedule's are scaled down where there are fewer steps."
    return Table("Settings", ["", "here", "paper"], [[r["what"], r["here"], r["paper"]] for r in rows], note)
