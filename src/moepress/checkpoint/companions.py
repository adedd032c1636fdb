"""The files beside the weights: tokenizer, processor, chat template, licence, remote code."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from moepress.checkpoint.folder import FOLDERS

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".npz", ".index.json")
WRITTEN_BY_SAVING = ("config.json", "generation_config.json")
ABOUT_THE_ORIGINAL = ("readme.md", ".gitattributes", "training_args.bin", "trainer_state.json")


def copy_companions(source: str | os.PathLike[str], folder: str | os.PathLike[str]) -> list[str]:
    """Copy everything of a checkpoint but its weights, config and model card; returns the names copied. `source` is a
    folder, or a Hub name whose files have been downloaded."""
    from moepress.checkpoint.load import local_folder

    copied = []
    for entry in sorted(local_folder(source).iterdir()):
        name = entry.name.lower()
        target = Path(folder) / entry.name
        if entry.is_dir() and name in FOLDERS:
            shutil.copytree(entry, target, dirs_exist_ok=True)
        elif entry.is_file() and not name.endswith(WEIGHTS) and name not in WRITTEN_BY_SAVING + ABOUT_THE_ORIGINAL:
            if not target.exists():  # what saving wrote is newer: remote code, for instance
                # contents only: a source may be read-only, and its copy must not be
                shutil.copyfile(entry, target)
        else:
            continue
        copied.append(entry.name)
    return copied
