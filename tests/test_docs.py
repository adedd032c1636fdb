"""What README and docs say is true: code blocks run, numbers come from results, generated parts are up to date."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import moepress
from moepress.align import ALIGNMENTS
from moepress.cli.main import app
from moepress.methods import METHODS
from moepress.plan import SIMILARITIES
from moepress.recipe import make_recipe

ROOT = Path(__file__).parents[1]
ASSETS = Path(moepress.__file__).parent / "assets"
HISTORY = {"log.md"}
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").glob("*.md") if p.name not in HISTORY)]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
NOT_RUN = re.compile(r"<!-- not run: [^\n]+ -->\n\Z")
GENERATED = re.compile(r"<!-- generated: ([a-z-]+) -->\n(.*?)<!-- end -->", re.DOTALL)
NUMBER = re.compile(r"(?<![\w.])\d*\.\d+|\b\d[\d,]* ?(?:s|ms|min|GB|MB|kB|×|nats|times)\b")
EXPLAINED = "<!-- numbers: "


def hooks():
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass
class Block:
    language: str
    text: str
    run: bool


def blocks(text: str) -> list[Block]:
    return [Block(m[1], m[2], not NOT_RUN.search(text[: m.start()])) for m in FENCE.finditer(text)]


@pytest.fixture
def folder(tmp_path, monkeypatch, request):
    """A place as a reader has it: a model, some text to calibrate on, and some to judge by."""
    shutil.copytree(ASSETS / "demo-moe", tmp_path / "MODEL")
    for name, source in (("text.jsonl", "demo-text.jsonl"), ("held-out.jsonl", "demo-eval.jsonl")):
        records = [json.loads(line) for line in (ASSETS / source).read_text().splitlines()[:6]]
        lines = [json.dumps({"text": record["text"]}) for record in records]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    if "report" not in request.node.name:  # pages are drawn where they are the subject: it takes a second each
        for place in ("moepress.api", "moepress.records"):
            monkeypatch.setattr(f"{place}.draw_report", lambda records: records / "report.html")
    yield tmp_path
    for registry in (METHODS, SIMILARITIES, ALIGNMENTS):  # examples register things of their own
        for name in [name for name, cls in registry if cls.__module__ == "__main__"]:
            del registry._entries[name]


def commands(text: str) -> list[list[str]]:
    joined = text.replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in joined.splitlines()]
    return [words for words in lines if words]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_blocks_run(page, folder):
    space = {"__name__": "__main__"}
    for block in blocks(page.read_text(encoding="utf-8")):
        if not block.run:
            continue
        if block.language == "sh":
            for words in commands(block.text):
                assert words[0] == "moepress", f"{page.name}: only moepress commands are run, not {words[0]!r}"
                done = CliRunner().invoke(app, words[1:])
                assert done.exit_code == 0, f"{page.name}: {shlex.join(words)}: {done.output} {done.exception!r}"
        elif block.language == "python":
            exec(compile(block.text, page.name, "exec", dont_inherit=True), space)
        elif block.language == "yaml":
            make_recipe(yaml.safe_load(block.text))
        elif block.language == "json":
            json.loads(block.text)
        else:
            assert block.language == "text" or not re.search(r"moepress|import", block.text), f"{page.name}: {block}"


def test_commands_and_blocks_are_found():
    found = {page.stem: blocks(page.read_text(encoding="utf-8")) for page in PAGES}
    run = [block for page in found.values() for block in page if block.run]
    assert sum(block.language == "sh" for block in run) >= 8 and sum(block.language == "python" for block in run) >= 5
    assert commands("moepress inspect A  # words\n\nmoepress \\\n  methods") == [
        ["moepress", "inspect", "A"],
        ["moepress", "methods"],
    ]
    assert [b.run for b in blocks("<!-- not run: why -->\n```sh\nx\n```\n\n```sh\ny\n```\n")] == [False, True]


def prose(text: str) -> str:
    """Without code, links, what is generated and lines that say where their numbers come from."""
    for pattern in (
        GENERATED,
        FENCE,
        re.compile(r"`[^`\n]+`"),
        re.compile(r"https?://\S+"),
        re.compile(r"\]\([^)]*\)"),
    ):
        text = pattern.sub(" ", text)
    return "\n".join(line for line in text.splitlines() if EXPLAINED not in line)


VERSIONS = re.compile(r"(?:Python|torch|transformers|Apache|to|before) ?-?\d+(?:\.\d+)*(?: to \d+(?:\.\d+)+)?")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_measured_numbers_are_generated_from_results(page):
    loose = NUMBER.findall(VERSIONS.sub(" ", prose(page.read_text(encoding="utf-8"))))
    assert not loose, f"{page.name}: put these into a generated block, or say where they come from: {loose}"


def test_a_loose_number_is_noticed():
    said = "It takes 3 s and `4 s` with torch 2.13; see [0.5](x/0.7).\n12 GB <!-- numbers: arithmetic -->\nKL .158\n"
    assert NUMBER.findall(VERSIONS.sub(" ", prose(said))) == ["3 s", "0.5", ".158"]


def test_the_readme_is_up_to_date():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert hooks().fill(text) == text, "run `python docs/hooks.py`"


def test_generated_numbers_are_those_of_the_results():
    shown = {name: block for name, block in GENERATED.findall((ROOT / "README.md").read_text(encoding="utf-8"))}
    saved = json.loads((ROOT / "benchmarks/results/h200/compare_qwen3moe-tiny.json").read_text())["rows"]
    kl = {(row["method"], row["keep"]): row["kl"] for row in saved}
    checked = 0
    for line in shown["kl"].splitlines()[2:]:
        cells = [cell.strip(" *`") for cell in line.strip("| ").split("|")]
        if (cells[0], 0.5) not in kl:
            continue
        said = [float(number) for number in re.findall(r"\.\d+", cells[1])]
        assert said == pytest.approx([kl[cells[0], keep] for keep in (0.75, 0.5)], rel=0.03), cells
        checked += 1
    assert checked >= 5
    cpu = json.loads((ROOT / "benchmarks/results/cpu/align.json").read_text())["layer"]
    slowest = max(case["per_problem"]["SciPy"]["median"] for case in cpu.values())
    assert f"to {slowest:.2g} s" in shown["alignment"]


def test_every_block_can_be_made_and_is_used():
    made = hooks().BLOCKS
    used = {name for page in PAGES for name, _ in GENERATED.findall(page.read_text(encoding="utf-8"))}
    assert used == set(made)
    assert all(f"| `{name}` |" in made["methods"]() for name in METHODS.names())
    assert all(f"| `{name}` |" in made["components"]() for name in SIMILARITIES.names())
    assert "`plan.similarity`" in made["options"]() and "`calibration.samples`" in made["options"]()


def test_the_site_builds_without_warnings(tmp_path):
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("needs mkdocs-material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    pages = {page.parent.name for page in (tmp_path / "site").rglob("index.html")}
    assert {"methods", "options", "paper", "format"} <= pages and "log" not in pages
    text = (tmp_path / "site" / "methods" / "index.html").read_text()
    assert all(name in text for name in METHODS.names())
