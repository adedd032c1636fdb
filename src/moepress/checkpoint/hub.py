"""The Hugging Face Hub: models that come from there, outputs that go there, and what it refuses, in one sentence."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moepress.checkpoint.folder import is_disk_full
from moepress.checkpoint.manifest import verify
from moepress.errors import MoepressError
from moepress.progress import progress_shown

NOT_NEEDED = ["*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf", "*.onnx", "original/*", "metal/*"]
STALE = ["*.safetensors", "*.safetensors.index.json"]
"""Of an earlier upload: a single file would be loaded instead of new shards, and old shards only take room."""
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)")
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


def hub_name(source: str | os.PathLike[str]) -> str | None:
    """The name on the Hub of what was given as a name, or as a folder of the Hub's cache; None for other folders."""
    path = Path(source).expanduser()
    if not path.exists():
        return os.fspath(source) if HUB_NAME.fullmatch(os.fspath(source)) else None
    cached = next((CACHED.fullmatch(part) for part in path.absolute().parts if part.startswith("models--")), None)
    return f"{cached[1]}/{cached[2]}" if cached else None


def download(name: str, revision: str | None, weights: bool = True) -> Path:
    """A model of the Hub as a folder; without `weights` only what is beside them."""
    from huggingface_hub import is_offline_mode, snapshot_download

    skipped = NOT_NEEDED if weights else [*NOT_NEEDED, "*.safetensors"]
    try:
        # Told nothing, it asks the Hub what a commit holds even where it may not ask and the commit is here.
        offline = is_offline_mode()
        return Path(snapshot_download(name, revision=revision, ignore_patterns=skipped, local_files_only=offline))
    except Exception as error:
        raise MoepressError(f"{name} is no folder here, and {reason(error, name, revision)}") from error


def upload(
    folder: Path,
    repo: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str = "Upload with moepress",
    token: str | None = None,
) -> str:
    """Upload a folder in one commit, so that the repository is never half of it; returns its address."""
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    try:
        made = api.create_repo(repo, private=private or None, exist_ok=True)
        if private and not api.repo_info(made.repo_id).private:
            raise MoepressError(f"{made.repo_id} is there already and is public: make it private on the Hub first")
        if revision is not None:
            api.create_branch(made.repo_id, branch=revision, exist_ok=True)
        with _bars(progress_shown()):
            api.upload_folder(
                repo_id=made.repo_id,
                folder_path=folder,
                revision=revision,
                commit_message=message,
                delete_patterns=STALE,
            )
    except MoepressError:
        raise
    except Exception as error:
        raise MoepressError(reason(error, repo, revision)) from error
    return str(made)


@contextmanager
def _bars(shown: bool) -> Iterator[None]:
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if shown or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def check_access(repo: str, token: str | None = None) -> None:
    """Raise if an upload to this name is bound to fail: to be asked before hours are spent on what goes there."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
        known: dict[str, Any] = HfApi(token=token).whoami()
    except Exception as error:
        raise MoepressError(reason(error, repo)) from error
    access = (known.get("auth") or {}).get("accessToken") or {}
    if access.get("role") == "read":
        raise MoepressError(f"the token of {known.get('name')} may only read: make one that may write, and {LOG_IN}")


def check_whole(folder: Path) -> None:
    """Raise if an output is not what was written, so that nothing damaged is uploaded."""
    found = verify(folder)
    if not found.whole:
        name, what = next(iter(found.wrong.items()))
        raise MoepressError(f"nothing was uploaded, since {folder} is not as it was written: {name} {what}")


def reason(error: BaseException, name: str, revision: str | None = None) -> str:
    """What the Hub, or the way to it, has against a request about this name."""
    from huggingface_hub import errors, is_offline_mode

    chain = list(_causes(error))

    def found(kind: Any) -> Any:
        return next((one for one in chain if isinstance(one, kind)), None)

    answer = found(errors.HfHubHTTPError)
    status = None if answer is None else getattr(answer.response, "status_code", None)
    if found(errors.HFValidationError):
        return f"{name!r} is no name of a model on the Hub: such a name is USER/MODEL"
    if found(errors.OfflineModeIsEnabled) or (is_offline_mode() and found(errors.LocalEntryNotFoundError)):
        return f"the Hub is not asked for {name}, since HF_HUB_OFFLINE is set"
    if found(errors.LocalTokenNotFoundError):
        return f"the Hub wants to know who you are: {LOG_IN}"
    if found(errors.GatedRepoError):
        return f"{name} asks for its terms to be accepted: do so on its page on the Hub, then {LOG_IN}"
    if found(errors.RevisionNotFoundError):
        return f"{name} has no revision {revision!r} on the Hub"
    if status == 401 and not found(errors.RepositoryNotFoundError):
        return f"the Hub does not accept the token that it was given: {LOG_IN}"
    if found(errors.RepositoryNotFoundError):
        return f"the Hub has no model {name}, or it is private; if it is yours, {LOG_IN}"
    if status == 403:
        return f"the Hub does not let you write to {name}: {_words(answer)}"
    if status is not None:
        return f"the Hub refused with {status}: {_words(answer)}"
    if any(is_disk_full(one) for one in chain):
        return "the disk is full"
    way = any(isinstance(one, OSError) or type(one).__module__.startswith("httpx") for one in chain)
    return f"{'the Hub cannot be reached' if way else 'the request failed'} ({first_line(chain[-1])})"


def _words(answer: Any) -> str:
    return " ".join((answer.server_message or first_line(answer)).split())


def _causes(error: BaseException) -> Iterator[BaseException]:
    known: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in known:
        known.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
