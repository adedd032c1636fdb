"""config.json in the words in which the original was published.

transformers writes a config in those of its own version: `rope_parameters` for `rope_theta`, `num_local_experts` for
`num_experts`. Other engines, and older versions, read the published words and take for a default what they do not find.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from moepress.checkpoint.counts import count_fields
from moepress.checkpoint.folder import read_json

OURS = ("quantization_config", "num_nextn_predict_layers", "expert_capacity", "architectures", "auto_map")
"""What may rightly differ from the original's, beside the number of experts."""
AnyPath = str | os.PathLike[str]
TYPES = ("torch_dtype", "dtype")


def keep_wording(source: AnyPath, folder: AnyPath, kind: type[PreTrainedConfig]) -> bool:
    """Rewrite the config.json of an output as the original in `source` has it, but for what has changed. False if it
    was left as it is, because transformers would then read something else in it."""
    from moepress.checkpoint.load import local_folder

    place = Path(folder) / "config.json"
    original, written = read_json(local_folder(source) / place.name), read_json(place)
    kept = reworded(original, written, kind.from_pretrained(folder))
    with tempfile.TemporaryDirectory() as beside:
        (Path(beside) / place.name).write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        if _meaning(beside, kind) != _meaning(folder, kind):
            return False
        shutil.copyfile(Path(beside) / place.name, place)
    return True


def reworded(original: dict[str, Any], written: dict[str, Any], config: PreTrainedConfig) -> dict[str, Any]:
    kept = copy.deepcopy(original)
    for prefix, holder, name, _ in list(count_fields(kept)):
        place: Any = config
        for part in prefix.split(".")[:-1]:
            place = _get(place, part)
        if (count := _get(place, name)) is not None:
            holder[name] = count
    for own, theirs in [(kept, written), (kept.get("text_config"), written.get("text_config"))]:
        if not isinstance(own, dict) or not isinstance(theirs, dict):
            continue
        for name in OURS:
            if name in theirs:
                own[name] = theirs[name]
            else:
                own.pop(name, None)
        if dtype := next((theirs[name] for name in TYPES if name in theirs), None):
            own |= {name: dtype for name in TYPES if name in own}
    return kept


def _get(place: Any, name: str) -> Any:
    return place.get(name) if isinstance(place, dict) else getattr(place, name, None)


def _meaning(folder: AnyPath, kind: type[PreTrainedConfig]) -> dict[str, Any] | None:
    try:
        meant = kind.from_pretrained(folder).to_dict()
    except Exception:  # a config is code; what it does not take is not kept
        return None
    return {name: value for name, value in meant.items() if name not in ("transformers_version", "_name_or_path")}
