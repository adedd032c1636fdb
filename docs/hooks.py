"""What the docs say about methods, options, families and measurements, made from the code and from benchmarks/results/.

`<!-- generated: NAME -->` … `<!-- end -->` in a page holds what `BLOCKS[NAME]` returns: put in when the site is built
(this file is a hook of MkDocs), and in README.md kept up to date with `python docs/hooks.py`; a test compares them.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- generated: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(columns: list[str], rows: list[list[str]]) -> str:
    line = lambda cells: "| " + " | ".join(cells) + " |"  # noqa: E731
    return "\n".join([line(columns), line(["---"] * len(columns)), *map(line, rows)])


def summary(cls: Any) -> str:
    return " ".join((cls.__doc__ or "").split())


def shown(value: Any) -> str:
    if value is None or value is dataclasses.MISSING:
        return "–"
    if isinstance(value, dict) and "name" in value:
        rest = ", ".join(f"{k}: {v}" for k, v in value.items() if k != "name")
        return f"`{value['name']}`" + (f" ({rest})" if rest else "")
    return f"`{json.dumps(value) if isinstance(value, (bool, list, dict)) else value}`"


# ---- from the registries ---------------------------------------------------------------------------------------------


def methods() -> str:
    from moepress.methods import METHODS
    from moepress.registry import linked

    rows = []
    for name, cls in METHODS:
        form = "compact, redirect" if cls.defaults.get("router", "redirect") == "redirect" else "one row an expert"
        rows.append([f"`{name}`", summary(cls), form, linked(cls.paper)])
    return table(["`--method`", "what it does", "router", "paper"], rows)


def method_details() -> str:
    from moepress.methods import METHODS
    from moepress.registry import linked

    parts = []
    for name, cls in METHODS:
        rows = [[f"`{key}`", shown(cls.defaults.get(key))] for key in sorted(cls.uses)]
        parts += [f"### {name}", summary(cls) + f"\n\nPaper: {linked(cls.paper)}.", table(["entry", "default"], rows)]
        for preset, entries in cls.presets.items():
            said = ", ".join(f"`{key}: {json.dumps(value)}`" for key, value in entries.items())
            parts.append(f"`--preset {preset}`: {said}")
    return "\n\n".join(parts)


def components() -> str:
    from moepress.recipe import PLACES
    from moepress.registry import linked

    parts = []
    for place, registry in PLACES.items():
        rows = []
        for name, cls in registry:
            own = (
                {f.name: getattr(cls(), f.name) for f in dataclasses.fields(cls)}
                if dataclasses.is_dataclass(cls)
                else {}
            )
            parameters = ", ".join(f"`{field}={default!r}`" for field, default in own.items())
            rows.append([f"`{name}`", summary(cls), parameters or "–", linked(getattr(cls, "paper", "")) or "–"])
        parts += [f"### {place}", table(["name", "what it does", "parameters", "paper"], rows)]
    return "\n\n".join(parts)


# ---- from the types of a recipe --------------------------------------------------------------------------------------


def options() -> str:
    from moepress.recipe import Recipe

    return table(["entry", "type", "default", "what it is"], list(entries(Recipe)))


def entries(model: Any, prefix: str = "") -> Iterator[list[str]]:
    from pydantic import BaseModel

    for name, field in model.model_fields.items():
        kind = field.annotation
        if inspect.isclass(kind) and issubclass(kind, BaseModel):
            yield from entries(kind, f"{prefix}{name}.")
        elif dataclasses.is_dataclass(kind):
            said = attribute_docs(kind)
            for own in dataclasses.fields(kind):
                yield [f"`{prefix}{name}.{own.name}`", type_of(own.type), shown(own.default), said.get(own.name, "")]
        else:
            default = field.default_factory() if field.default_factory else field.default
            yield [f"`{prefix}{name}`", type_of(kind), shown(default), field.description or ""]


def type_of(kind: Any) -> str:
    text = (
        kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind)) if inspect.isclass(kind) else str(kind)
    )
    text = text.replace("typing.", "").replace("NoneType", "None")
    text = text.replace("str | dict[str, Any]", "component").replace("Literal", "one of ")
    return "`" + text.replace("|", "or").replace(" or None", "") + "`"


def attribute_docs(cls: type) -> dict[str, str]:
    """The strings below the fields of a class."""
    found = re.findall(r'^    (\w+):[^\n]*\n    """(.*?)"""', inspect.getsource(cls), re.DOTALL | re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def python() -> str:
    import moepress

    parts = []
    for name in sorted(moepress.__all__):
        thing = getattr(moepress, name)
        if inspect.isfunction(thing):
            parts += [
                f"### {name}",
                f"```text\n{name}{pretty(inspect.signature(thing))}\n```",
                inspect.getdoc(thing) or "",
            ]
    return "\n\n".join(parts)


def pretty(signature: inspect.Signature) -> str:
    inside = ",\n    ".join(str(p).replace("transformers.modeling_utils.", "") for p in signature.parameters.values())
    return f"(\n    {inside}\n) -> {signature.return_annotation!s}"


# ---- families --------------------------------------------------------------------------------------------------------


def families() -> str:
    """Those that are tested, from the facts that were read off their tiny models."""
    rows = re.findall(
        r"^\| \*\*(\w+)\*\*<br>([^<|]+)<br>(\w+)", (ROOT / "docs/dev/families.md").read_text(), re.MULTILINE
    )
    layouts: dict[str, list[str]] = {}
    for name, layout, _ in rows:
        layouts.setdefault(layout.split(",")[0], []).append(f"`{name}`")
    words = {
        "fused": "experts in one tensor, as transformers stores most families",
        "variant": "a storage or gating of their own",
        "moduledict": "one module an expert",
    }
    listed = [[words.get(layout, layout), ", ".join(sorted(names))] for layout, names in layouts.items()]
    return table([f"{len(rows)} families", "`model_type` or class"], listed)


# ---- measurements ----------------------------------------------------------------------------------------------------


def result(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def short(value: float) -> str:
    """.158, and .0082 below a hundredth."""
    return f"{value:.{3 if value >= 0.0095 else 4}f}".lstrip("0")


MODELS = {
    "qwen3moe-tiny": "32 experts top-4, skewed routing",
    "olmoe": "64 experts top-8",
    "deepseek": "32 + 1 shared, balanced",
}
VARIATIONS = {"hc-smoe, rows": "`hc-smoe`, one router row an expert"}
"""Of methods in the results; others were research and are not shown."""
KEPT = (0.75, 0.5)


def kl() -> str:
    """Of every comparison that was made on these models; what has not been measured stays empty."""
    from moepress.methods import METHODS

    names = {name: f"`{name}`" for name in METHODS.names()} | VARIATIONS
    found: dict[str, dict[tuple[str, float], float]] = {}
    commands: dict[str, str] = {}
    for model in MODELS:
        for file in sorted(RESULTS.glob(f"*/compare_{model}*.json"), key=lambda file: file.parent.name != "h200"):
            saved = json.loads(file.read_text(encoding="utf-8"))
            shown_here = [row for row in saved["rows"] if row["method"] in names and row["keep"] in KEPT]
            for row in shown_here:
                found.setdefault(row["method"], {}).setdefault((model, row["keep"]), row["kl"])
            if shown_here:
                commands.setdefault(
                    saved["command"].replace(model, "MODEL"), f"`benchmarks/results/{file.parent.name}/`"
                )
    best = {
        key: min(own[key] for own in found.values() if key in own)
        for key in {key for own in found.values() for key in own}
    }

    def one(own: dict[tuple[str, float], float], key: tuple[str, float]) -> str:
        return f"**{short(own[key])}**" if own[key] == best[key] else short(own[key])

    rows = []
    for method, own in sorted(found.items(), key=lambda item: -item[1].get(("qwen3moe-tiny", 0.5), 0.0)):
        cells = [" / ".join(one(own, (model, keep)) for keep in KEPT if (model, keep) in own) for model in MODELS]
        rows.append([names[method], *cells])
    made = "\n".join(f"- `{command}`: {place}" for command, place in commands.items())
    return table(["method", *MODELS.values()], rows) + f"\n\nMade by, with files in:\n\n{made}"


def alignment() -> str:
    """Of the whole switch-base-32 on one GPU, and of one matching on one CPU core."""
    gpu, cpu = result("h200/align.json"), result("cpu/align.json")
    whole = gpu["model"]["iid"]
    seconds = whole["cost"] + whole["solve"]["median"]
    ours = sorted(case["per_problem"]["solve"]["median"] for case in cpu["layer"].values())
    scipy = sorted(case["per_problem"]["SciPy"]["median"] for case in cpu["layer"].values())
    return (
        f"Aligning the experts of a whole switch-base-32 ({whole['problems']} matchings of "
        f"{gpu['settings']['hidden']} units) takes {seconds:.2g} s on an H200, costs included. "
        f"One matching takes {1000 * ours[0]:.2g} to {1000 * ours[-1]:.2g} ms on a CPU core, where SciPy takes "
        f"{scipy[0]:.2g} to {scipy[-1]:.2g} s. Each comes with a proof of how near it is to the best. "
        "`moepress bench align`, files `benchmarks/results/*/align.md`."
    )


def memory() -> str:
    """Peak memory of compressing random checkpoints."""
    rows, commands = [], []
    gb = lambda size: f"{size / 1e9:.2f} GB"  # noqa: E731
    for file in sorted((RESULTS / "cpu").glob("memory_*.json")):
        found = json.loads(file.read_text(encoding="utf-8"))
        commands.append(f"- `{found['command']}`: `benchmarks/results/cpu/{file.name}`")
        for row in found["rows"].values():
            peak = "refused" if "refused" in row else gb(row["peak"])
            floor = f"{row['read'] + row['forward']:.0f} s" if "read" in row else ""
            may = row["budget"] or gb(row["allowed"])
            cells = [row["shape"], gb(row["bytes"]), f"`{row['method']}`", may, peak, gb(row["program"])]
            rows.append([*cells, f"{row['cpu']:.0f} s", floor])
    head = ["shape", "checkpoint", "method", "may take", "peak", "of that, program", "CPU time", "floor"]
    return table(head, rows) + "\n\nMade by:\n\n" + "\n".join(commands)


CORES, PROCESSES = 512, 8
"""Of the machines that the table of large models is about."""


def large_models() -> str:
    found = json.loads((RESULTS / "cpu" / "large_models.json").read_text(encoding="utf-8"))
    rates, giga = found["rates"], 1e9
    share = min(rates["share"].values())
    took = lambda seconds: f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"  # noqa: E731
    parts = []
    for name, model in found["models"].items():
        rows = []
        for method, needs in model["methods"].items():
            memory = needs["memory"]
            rows.append(
                [
                    f"`{method}`",
                    f"{memory['1']['total'] / giga:.0f} GB ({memory['1']['spilled'] / giga:.0f} GB)",
                    f"{memory[str(PROCESSES)]['total'] / giga:.0f} GB",
                    f"{needs['operations'] / 1e15:.1f}",
                    took(needs["operations"] / (CORES * share * rates["core"])),
                    f"{needs['read'] / 1e12:.1f} TB, {took(needs['read'] / rates['read'])}",
                    f"{needs['network'] / giga:,.2f} GB, {took(needs['network'] / rates['gloo'])}",
                ]
            )
        head = [name, "memory, 1 process", f"each of {PROCESSES}", "10¹⁵ operations", f"on {CORES} cores"]
        sizes = [f"{model[key] / giga:,.0f}" for key in ("parameters", "bytes", "bytes_after")]
        layer = f"{model['layer_bytes'] / giga:.1f}"
        parts += [
            f"**{name}**: {sizes[0]} B parameters, {sizes[1]} GB in 16 bits, of which a layer is {layer} GB; half "
            f"of the experts leave {sizes[2]} GB.",
            table([*head, "read by each", "sums that travel"], rows),
        ]
    settings = found["settings"]
    measured = (
        f"{settings['samples']} samples of {settings['length']} tokens, half of the experts, float32 on CPUs. Rates "
        "measured on a virtual machine of two cores that had much other work, so that most others do better: "
        f"{rates['core'] / giga:.0f} GFLOP/s a core in large products, of which a run gets "
        f"{100 * share:.0f} %; {rates['read'] / giga:.1f} GB/s read from disk; {rates['gloo'] / giga:.2f} GB of sums a "
        "second between two processes over gloo. In brackets: memory when activations wait on disk. Made by "
        "`python benchmarks/large_models.py`, file `benchmarks/results/cpu/large_models.json`."
    )
    return "\n\n".join([*parts, measured])


def quantised() -> str:
    """KL of pruned and refitted quantised checkpoints beside that of their unpacked twins."""
    saved = result("cpu/quantised.json")
    rows = []
    for row in saved["rows"]:
        size = f"{row['bytes'] / 1e6:.1f} MB, {row['bytes_bf16'] / 1e6:.1f} in bf16"
        rows.append([f"{row['format']}, not compressed", f"{row['kl']:.4f}", "", size])
        for method in ("reap-all", "prune-refit"):
            ours, twin = row[f"{method}, quantised"], row[f"{method}, unpacked"]
            size = f"{ours['bytes'] / 1e6:.1f} MB, {twin['bytes'] / 1e6:.1f} in bf16"
            rows.append([f"{row['format']}, `{method}`", f"{ours['kl']:.4f}", f"{twin['kl']:.4f}", size])
    return table(["half of the experts", "KL", "KL of the unpacked twin", "size"], rows) + f"\n\n`{saved['command']}`"


def layer_speed() -> str:
    """All versions of one layer on a CPU core: their time as shares of two others in the same rounds."""
    data = result("cpu/layer.json")
    cases = [(tokens, dtype) for tokens in (8, 416) for dtype in data["settings"]["dtypes"]]
    found = {(row["version"], row["tokens"], row["dtype"]): row for row in data["rows"]}
    words = {row["version"]: row["words"] for row in data["rows"]}
    rows = [
        [text, *(f"{found[name, *case]['to_native']:.2f} / {found[name, *case]['to_dense']:.2f}" for case in cases)]
        for name, text in words.items()
    ]
    columns = ["version", *(f"{tokens} tokens, {dtype}" for tokens, dtype in cases)]
    return f"{table(columns, rows)}\n\n`{data['command']}`, on: {data['machine']['words']}."


def model_speed() -> str:
    data = result("cpu/model.json")
    settings = data["settings"]
    rows = [
        [row["words"], f"{row['parameters'] / 1e6:.0f} M", f"{row['to_native']:.2f}", f"{row['to_dense']:.2f}"]
        for row in data["rows"]
        if row["batch"] == settings["batches"][0]
    ]
    columns = ["version", "parameters", "to all experts in transformers", "to dense"]
    return f"{table(columns, rows)}\n\n`{data['command']}`, on: {data['machine']['words']}."


def speed() -> str:
    """In one sentence each."""
    layer, merge = result("cpu/layer.json"), result("cpu/merge.json")
    shares = {(row["version"], row["dtype"]): row for row in layer["rows"] if row["tokens"] == 416}
    read = {row["dtype"]: row["to_read"] for row in merge["rows"] if row["way"] == "merge"}
    merged = [f"{shares['m-smoe', dtype]['to_native']:.0%} ({dtype})" for dtype in layer["settings"]["dtypes"]]
    small = [f"{shares['mc-smoe', dtype]['to_dense']:.0%} ({dtype})" for dtype in layer["settings"]["dtypes"]]
    times = [f"{factor:.1f} times ({dtype})" for dtype, factor in read.items()]
    return (
        f"On one CPU core and 416 tokens, a Switch layer of {layer['settings']['experts']} experts merged to "
        f"{layer['settings']['keep']} takes {' and '.join(merged)} of the time of transformers' layer with all "
        f"experts; decomposed as well, {' and '.join(small)} of the time of a dense layer of one expert's size. "
        f"Merging such a layer takes {' and '.join(times)} as long as reading its bytes from the page cache. "
        "`moepress bench layer` and `merge`, files `benchmarks/results/cpu/`."
    )


BLOCKS: dict[str, Callable[[], str]] = {
    "methods": methods,
    "method-details": method_details,
    "components": components,
    "options": options,
    "python": python,
    "families": families,
    "kl": kl,
    "alignment": alignment,
    "large-models": large_models,
    "quantised": quantised,
    "memory": memory,
    "speed": speed,
    "layer-speed": layer_speed,
    "model-speed": model_speed,
}


def fill(text: str) -> str:
    return BLOCK.sub(lambda m: f"{m[1]}{BLOCKS[m[2]]()}\n{m[3]}", text)


def on_page_markdown(markdown: str, **_: Any) -> str:
    return fill(markdown)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    before = readme.read_text(encoding="utf-8")
    after = fill(before)
    readme.write_text(after, encoding="utf-8")
    sys.exit(0)
