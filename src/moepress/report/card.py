"""The model card of an output: README.md, which the Hub shows, made from saved values.

`evaluate` and `push` write between marks; what a person changes elsewhere stays.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from moepress import __version__
from moepress.bench.results import Table
from moepress.checkpoint.load import TOKENIZER_FILES
from moepress.checkpoint.manifest import CARD
from moepress.checkpoint.quantizer import METHOD
from moepress.methods import METHODS
from moepress.registry import linked
from moepress.report.numbers import change, human_size
from moepress.report.records import RECORDS, SUMMARY, Records, read_records
from moepress.report.report import evaluation_tables, lead_of

TRAINING = "recovery.json"
"""What training did to an output, in its records."""
ORIGINAL = "ORIGINAL_README.md"
"""The original's own card: what it says is about the original."""
OURS = "<!-- a model card by moepress -->"
LOADING = "<!-- loading: `moepress push` writes the name on the Hub below -->"
QUALITY = "<!-- quality: `moepress evaluate` writes from here to the next mark -->"
END = "<!-- end of quality -->"
KEPT = ("language", "license", "license_name", "license_link", "pipeline_tag")
"""What holds for the smaller model, too, of the metadata in the original's card."""
PLACE = re.compile(r"[/\\]")
UNMEASURED = (
    "Not measured yet. `moepress evaluate OUT --against ORIGINAL --text held-out.jsonl` measures it and writes it here."
)


def write_card(folder: Path, records: Path, title: str, source: Path | None = None, base: str | None = None) -> None:
    """Write the card of the checkpoint in `folder`, whose records lie in `records`. `source` is the folder that it was
    made of, whose card is kept beside it or, if it is one of these, built upon; `base` the Hub's name of the original.
    """
    from huggingface_hub import ModelCardData

    kept, ours = _of_source(source)
    if source is not None and not ours and (card := source / CARD).is_file():
        shutil.copyfile(card, folder / ORIGINAL)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    data = {name: kept[name] for name in KEPT if kept.get(name)}
    if base := (kept.get("base_model") if ours else None) or base:
        data["base_model"] = base
    if _architecture(config).endswith("ForCausalLM"):
        data.setdefault("pipeline_tag", "text-generation")
    known = read_records(records) if (records / SUMMARY).is_file() else None
    original = base if known is None else kept.get("base_model") if ours else known.summary.get("base_model")
    trained = _json(records / TRAINING, [])
    tags = ["moepress", "mixture-of-experts"] + ["compressed"] * bool(known) + list(kept.get("tags") or []) * ours
    metadata = ModelCardData(library_name="transformers", tags=list(dict.fromkeys(tags)), **data)
    parts = [
        f"---\n{metadata.to_yaml()}\n---\n",
        OURS,
        f"# {title}",
        _first_words(known, trained, original),
        *(_sizes(known) if known else []),
        "## Quality",
        f"{QUALITY}\n{_quality(known)}\n{END}",
        "## Use",
        _use(config, title, with_tokenizer=any(file.name.startswith(TOKENIZER_FILES) for file in folder.iterdir())),
        *_how(known, trained, (folder / RECORDS).is_dir(), base),
        *_about_original(folder),
    ]
    (folder / CARD).write_text("\n\n".join(part.rstrip("\n") for part in parts) + "\n", encoding="utf-8")


def update_card(folder: Path, records: Path) -> bool:
    """Write the measured quality into the card of an output; False if there is no place for it."""
    return _write_between(folder / CARD, QUALITY, END, f"\n{_quality(read_records(records))}\n")


def name_in_card(folder: Path, repo: str) -> None:
    """Let the card say how the model is loaded from the Hub."""
    card = folder / CARD
    if card.is_file() and LOADING in (text := card.read_text(encoding="utf-8")):
        head, _, tail = text.partition(LOADING)
        code, fence, rest = tail.partition("\n```\n")
        code = re.sub(r'from_pretrained\("[^"]*"', f'from_pretrained("{repo}"', code)
        _replace(card, head + LOADING + code + fence + rest)


def _write_between(card: Path, start: str, end: str, content: str) -> bool:
    if not card.is_file():
        return False
    before, mark, rest = card.read_text(encoding="utf-8").partition(start)
    _, closed, after = rest.partition(end)
    if not mark or not closed:
        return False
    _replace(card, before + mark + content + closed + after)
    return True


def _replace(card: Path, text: str) -> None:
    partial = card.with_name(f".{card.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, card)


def _of_source(source: Path | None) -> tuple[dict[str, Any], bool]:
    """The metadata of the card of what the model was made of, and whether moepress wrote that card."""
    from huggingface_hub import ModelCard

    try:
        text = "" if source is None else (source / CARD).read_text(encoding="utf-8")
        return (ModelCard(text, ignore_metadata_errors=True).data.to_dict() if text else {}), OURS in text
    except (OSError, ValueError, yaml.YAMLError):  # somebody else's file: what cannot be read is left out
        return {}, False


# ---- what it says ----------------------------------------------------------------------------------------------------


def _first_words(known: Records | None, trained: list[dict[str, Any]], base: Any) -> str:
    if known is None:
        student = public(trained[-1]["student"], base) if trained else "a model"
        return f"Made of {student} by `moepress` {__version__}."
    name = (
        f"[{base}](https://huggingface.co/{base})"
        if isinstance(base, str)
        else f"`{known.summary['model'] or 'a model in memory'}`"
    )
    method = known.summary["method"]
    papers = linked(METHODS.get(method).paper) if method in METHODS.names() else ""
    said = f"{name}, made smaller by `moepress` {known.summary['moepress']}. {lead_of(known)}"
    if known.summary.get("duplicated"):
        said += " Here each merged expert is written out once for each original one: exact, and no smaller."
    return f"{said} The method: {papers}." if papers else said


def _sizes(known: Records) -> list[str]:
    before, after = known.summary["before"], known.summary["after"]
    counts = [sum(layer.experts for layer in known.plan.layers), sum(layer.physical for layer in known.plan.layers)]
    if known.summary.get("duplicated"):
        counts[1] = counts[0]
    rows = [
        ("weights", human_size(before["bytes"]), human_size(after["bytes"]), change(before["bytes"], after["bytes"])),
        *(
            (words, f"{before[key]:,}", f"{after[key]:,}", change(before[key], after[key]))
            for words, key in (("parameters", "parameters"), ("of these in experts", "expert_parameters"))
        ),
        (f"experts in {len(known.plan.layers)} layers", *(f"{count:,}" for count in counts), change(*counts)),
    ]
    table = Table("Size", ["", "before", "after", ""], [list(row) for row in rows])
    return [table.markdown()]


def _quality(known: Records | None) -> str:
    if known is None or not known.evaluations:
        return UNMEASURED
    base = known.summary.get("base_model")
    said = "Measured by `moepress evaluate`."
    if any("kl" in entry["score"] for entry in known.evaluations):
        said += (
            " KL is to the original, in nats per token; agreement is how often both find the same token most probable."
        )
    tables = [
        replace(table, note=f"`{public_command(table.note, base)}`").markdown() for table in evaluation_tables(known)
    ]
    return "\n\n".join([said, *(f"#{table}" for table in tables)])


def _use(config: dict[str, Any], title: str, with_tokenizer: bool) -> str:
    auto = _auto_class(config)
    compact = (config.get("quantization_config") or {}).get("quant_method") == METHOD
    trust = ", trust_remote_code=True" if config.get("auto_map") else ""
    needs = "It needs `pip install moepress`, and the import." if compact else "It needs nothing but transformers."
    classes = {"model": auto} | ({"tokenizer": "AutoTokenizer"} if with_tokenizer else {})
    load = [f'{what} = {cls}.from_pretrained("{title}"{trust})' for what, cls in classes.items()]
    lines = ["import moepress  # transformers then knows the format"] * compact
    lines += [f"from transformers import {', '.join(classes.values())}", "", *load]
    more = "" if compact else "\n\nOther engines load it as they load the original."
    code = "\n".join(lines)
    return f"{needs}\n\n{LOADING}\n```python\n{code}\n```{more}"


def _how(known: Records | None, trained: list[dict[str, Any]], inside: bool, base: Any) -> list[str]:
    parts = ["## How it was made"]
    if known is not None:
        recipe = yaml.safe_load(known.recipe)
        if (recipe.get("calibration") or {}).get("source"):
            recipe["calibration"]["source"] = public(recipe["calibration"]["source"], base)
        if command := known.summary.get("command"):
            parts.append(f"```sh\n{public_command(command, base)}\n```")
        text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
        parts.append(f"The whole recipe:\n\n```yaml\n{text}```")
        parts += [f"- {note}" for note in known.summary.get("notes", [])]
    for run in trained:
        held = run["report"].get("held_out") or []
        said = "Then trained" if known else "Trained"
        said += f" for {run['report']['steps']} steps on `{public(run['data'], base)}`"
        said += f" with `{public(run['teacher'], base)}` as its teacher" if run["teacher"] else ""
        best = dict(map(tuple, held)).get(run["report"].get("best"))
        said += f"; the loss on what was held out went from {held[0][1]:.4g} to {best:.4g}" if best is not None else ""
        parts.append(f"{said}.")
    if inside and known is not None:
        parts.append(f"The plan, the statistics and a report with figures are in the folder `{RECORDS}/`.")
    return parts


def _about_original(folder: Path) -> list[str]:
    if not (folder / ORIGINAL).is_file():
        return []
    said = f"Its own card is [{ORIGINAL}]({ORIGINAL}). What that measures and claims is about the original, not about "
    return ["## The original", said + "this model; its licence holds here, too."]


def _architecture(config: dict[str, Any]) -> str:
    return (config.get("architectures") or [""])[0]


def _auto_class(config: dict[str, Any]) -> str:
    name = _architecture(config)
    if name.endswith("ForCausalLM"):
        return "AutoModelForCausalLM"
    if config.get("is_encoder_decoder"):
        return "AutoModelForSeq2SeqLM"
    return "AutoModelForImageTextToText" if name.endswith("ForConditionalGeneration") else name or "AutoModel"


def public_command(command: str, base: Any = None) -> str:
    return shlex.join(public(word, base) for word in shlex.split(command))


def public(word: str, base: Any = None) -> str:
    """Without the folders of the machine on which it was typed: they are nobody's business."""

    def shown(part: str) -> str:
        if part == base or part.startswith(("hub:", "{", "[")):
            return part
        head, at, place = part.rpartition("@")
        return head + at + PLACE.split(place.rstrip("/"))[-1]

    return ",".join(shown(part) for part in word.split(","))


def _json(file: Path, otherwise: Any) -> Any:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else otherwise
