"""The notebooks run from the first cell to the last, and are stored without what they print."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def test_they_are_found():
    assert len(NOTEBOOKS) == 3


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_stored_without_outputs(file):
    nbformat = pytest.importorskip("nbformat")
    book = nbformat.read(file, as_version=4)
    nbformat.validate(book)
    for cell in book.cells:
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None, f"{file.name}: clear the outputs before storing"


@pytest.mark.slow
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_it_runs(file, tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR", "TMPDIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setitem(os.environ, name, str(tmp_path / name))
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    book = nbformat.read(file, as_version=4)
    nbclient.NotebookClient(
        book, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    said = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    assert said and not [output for output in said if output.output_type == "error"]
