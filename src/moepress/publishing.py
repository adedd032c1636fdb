"""The public function that uploads an output to the Hub."""

from __future__ import annotations

import os
from pathlib import Path

from moepress.checkpoint.hub import check_access, check_whole, upload
from moepress.errors import MoepressError
from moepress.report.card import name_in_card

__all__ = ["check_access", "push"]


def push(
    out: str | os.PathLike[str],
    repo: str,
    *,
    private: bool = False,
    revision: str | None = None,
    token: str | None = None,
) -> str:
    """Upload an output as a model of the Hub, in one commit, if it is as it was written; returns its address.

    `repo` is USER/MODEL, made if it is not there, and `private` if so asked; `revision` is a branch. Weights of an
    earlier upload are removed. The token is by default the one of `hf auth login` or of HF_TOKEN.
    """
    folder = Path(out)
    if not folder.is_dir():
        raise MoepressError(f"{folder} is not a folder")
    try:
        check_access(repo, token)
        check_whole(folder)
        name_in_card(folder, repo)
        return upload(folder, repo, private=private, revision=revision, token=token)
    except MoepressError as error:
        raise MoepressError(f"{error}; {folder} is kept, and `moepress push {folder} {repo}` tries again") from error
