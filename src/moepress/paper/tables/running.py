"""The paper's tables of what models cost to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Printed = tuple[str, tuple[str, ...], tuple[tuple[str, ...], ...]]
"""Label of the table, its columns, its rows."""


@dataclass(frozen=True)
class RunningTable:
    title: str
    rows: Mapping[str, Mapping[str, Any] | None]
    """By name, what is done to the model beside M-SMoE's recipe; None: nothing."""
    batch_sizes: str
    printed: tuple[Printed, ...]
    needs: str = "Needs a model, and text or tasks to calibrate on."


RUNNING = {
    "latency": RunningTable(
        "Latency, with all router rows and with one an expert",
        {"full": None, "m-smoe": {}, "m-smoe, pruned router": {"router": "keep"}},
        "32,256,512",
        (
            (
                "tab:memory-latency",
                ("", "32: TFLOPs", "s", "256: TFLOPs", "s", "512: TFLOPs", "s"),
                (
                    ("dense", "2.33", "0.08", "25.51", "0.85", "59.32", "2.33"),
                    ("full", "2.33", "0.18", "25.51", "1.02", "59.32", "2.50"),
                    ("m-smoe", "2.33", "0.17", "25.51", "0.99", "59.32", "2.48"),
                    ("m-smoe, pruned router", "2.33", "0.13", "25.51", "0.93", "59.32", "2.38"),
                ),
            ),
        ),
    ),
    "cost": RunningTable(
        "Throughput, latency, operations, memory and size",
        {"full": None, "m-smoe": {}, "mc-smoe": {"method": "mc-smoe"}},
        "4",
        tuple(
            (
                where,
                ("", "tokens per ms", "latency ms", "GFLOPs", "memory", "size"),
                (
                    ("full", "4.47", "114.3", "232", "3895MB", "2.0B"),
                    ("m-smoe", *merged, "232", "1456MB", "733M"),
                    ("mc-smoe", *both, "186", "715MB", "381M"),
                ),
            )
            for where, merged, both in (
                ("tab:vanilla-cost-analysis", ("4.82", "106.2"), ("2.71", "189.0")),
                ("tab:optimized-cost-analysis", ("7.91", "64.7"), ("6.27", "81.6")),
            )
        ),
    ),
}
