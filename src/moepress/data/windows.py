"""Windows of token ids that were cut beforehand, in a .safetensors file."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from moepress.errors import MoepressError

Windows = dict[str, Tensor]
"""Domain → (N, L) token ids."""


def read_windows(path: str | Path) -> Windows:
    """One (N, L) integer tensor per domain; a single tensor's domain is called like the file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not Path(path).is_file():
        raise MoepressError(f"there is no file {path}")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise MoepressError(f"{path} is not a safetensors file: {error}") from None
    if not tensors:
        raise MoepressError(f"{path} is empty: it holds no windows")
    for name, ids_NL in tensors.items():
        if ids_NL.dim() != 2 or ids_NL.is_floating_point() or not ids_NL.numel():
            raise MoepressError(
                f"{path}: {name!r} must hold windows of token ids, (windows, length) integers; "
                f"it is {tuple(ids_NL.shape)} {str(ids_NL.dtype).removeprefix('torch.')}"
            )
    if len(tensors) == 1:
        return {Path(path).name.partition(".")[0]: next(iter(tensors.values())).long()}
    return {name: ids_NL.long() for name, ids_NL in tensors.items()}


def check_ids(ids_NL: Tensor, vocabulary: int, what: str) -> None:
    low, high = int(ids_NL.min()), int(ids_NL.max())
    if low < 0 or high >= vocabulary:
        raise MoepressError(
            f"{what} holds token id {low if low < 0 else high}, but the model knows 0 to {vocabulary - 1}: "
            "it was made with another tokenizer"
        )
