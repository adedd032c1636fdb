"""The page of a comparison, from what `moepress compare` saves."""

from __future__ import annotations

import csv

import pytest

from moepress.comparison.page import nearest, write_page

from .browser import AVAILABLE, browser


def row(method: str, size: str, seed: int, weights: int, kl: float) -> dict:
    return {"method": method, "size": size, "seed": seed, "bytes": weights, "kl": kl, "perplexity": 9 + kl,
            "agreement": 0.9, "continuation": 0.5, "seconds": 3.0, "peak_memory": None}  # fmt: skip


DATA = {
    "command": "moepress compare models/tiny --methods a,b",
    "machine": {"words": "a machine"},
    "settings": {"model": "models/tiny", "seeds": 2, "new": 32, "prompt": 64},
    "out_of_reach": {},
    "original": {"bytes": 10_000_000, "perplexity": 9.0, "domains": {}},
    "rows": {
        str(i): row(*values)
        for i, values in enumerate(
            [
                ("rounding", "8 bits", 0, 5_000_000, 0.01),
                *(("a", "keep 0.75", seed, 8_000_000, kl) for seed, kl in enumerate((0.02, 0.04))),
                *(("b", "keep 0.75", seed, 8_000_000, kl) for seed, kl in enumerate((0.05, 0.06))),
                *(("a", "keep 0.5", seed, 6_000_000, kl) for seed, kl in enumerate((0.3, 0.5))),
                *(("b", "keep 0.5", seed, 6_000_000, kl) for seed, kl in enumerate((0.2, 0.3))),
            ]
        )
    },
}


def test_one_line_a_method_with_its_spread(tmp_path):
    page = write_page(DATA, tmp_path, "compare")
    assert {file.name for file in tmp_path.iterdir()} == {f"compare.{kind}" for kind in ("html", "svg", "png", "csv")}
    rows = list(csv.DictReader((tmp_path / "compare.csv").open()))
    assert [(r["method"], r["size"]) for r in rows] == [
        ("rounding", "8 bits"), ("a", "keep 0.5"), ("a", "keep 0.75"), ("b", "keep 0.5"), ("b", "keep 0.75")
    ]  # fmt: skip
    assert float(rows[2]["kl"]) == pytest.approx(0.03) and float(rows[2]["kl_deviation"]) == pytest.approx(
        0.02**0.5 / 10
    )
    assert rows[0]["kl_deviation"] == ""
    assert [(size, method) for size, method, _, _ in nearest(DATA)] == [("keep 0.75", "a"), ("keep 0.5", "b")]
    assert "0.0300 ± 0.0141" in page.read_text()


@pytest.mark.skipif(not AVAILABLE, reason="needs chromium and chromedriver")
def test_in_a_browser(tmp_path):
    page = write_page(DATA, tmp_path, "compare")
    with browser() as seen:
        for width in (390, 1440):
            seen.open(page, width, dark=width == 390)
            assert seen.run("return document.documentElement.scrollWidth <= innerWidth")
        x, y = seen.run(
            "const box = document.querySelector('.only-wide svg').getBoundingClientRect();"
            "const at = JSON.parse(document.querySelector('.hover').textContent).at.wide[2];"
            "return [box.left + box.width * at[0], box.top + box.height * at[1]]"
        )
        seen.point(x, y)
        assert seen.run("return document.getElementById('tip').textContent").startswith("a, keep 0.75: KL 0.03 ±")
        assert seen.log() == []
