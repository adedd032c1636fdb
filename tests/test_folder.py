"""Output folders are whole or absent; inputs are checked before anything is computed."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moepress.checkpoint.companions import copy_companions
from moepress.checkpoint.folder import check_checkpoint, is_disk_full, output_folder, refuse_output
from moepress.checkpoint.headers import floating_dtypes, read_header
from moepress.errors import MoepressError


def listing(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


# ---- writing ---------------------------------------------------------------------------------------------------------


def test_nothing_is_visible_before_the_end(tmp_path: Path) -> None:
    with output_folder(tmp_path / "deep" / "out") as folder:
        (folder / "a.txt").write_text("a")
        (folder / "sub").mkdir()
        (folder / "sub" / "b.txt").write_text("b")
        assert not (tmp_path / "deep" / "out").exists()
        assert folder.name.startswith(".out.partial-")
    assert listing(tmp_path / "deep") == ["out"]
    assert (tmp_path / "deep" / "out" / "sub" / "b.txt").read_text() == "b"


def test_mode_follows_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        with output_folder(tmp_path / "out"):
            pass
    finally:
        os.umask(old)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt(), SystemExit(3)])
def test_an_error_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), output_folder(tmp_path / "out") as folder:
        (folder / "a.txt").write_text("a")
        raise error
    assert listing(tmp_path) == []


def test_refuses_what_is_there(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with output_folder(out) as folder:  # an empty folder is fine
        (folder / "new.txt").write_text("new")
    with pytest.raises(MoepressError, match="is not empty"), output_folder(out):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(MoepressError, match="is a file"), output_folder(tmp_path / "file", overwrite=True):
        pass
    assert listing(out) == ["new.txt"]


def test_overwrite_replaces_only_after_success(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "old.txt").write_text("old")
    with pytest.raises(RuntimeError), output_folder(out, overwrite=True) as folder:
        (folder / "new.txt").write_text("new")
        raise RuntimeError
    assert listing(out) == ["old.txt"]
    with output_folder(out, overwrite=True) as folder:
        (folder / "new.txt").write_text("new")
        assert listing(out) == ["old.txt"]
    assert listing(tmp_path) == ["out"]
    assert listing(out) == ["new.txt"]


def test_a_failing_rename_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "old.txt").write_text("old")
    replace = os.replace

    def fail_into_place(a: Path, b: Path) -> None:
        if ".partial-" in str(a):
            raise OSError(errno.EIO, "broken")
        replace(a, b)

    monkeypatch.setattr(os, "replace", fail_into_place)
    with pytest.raises(OSError, match="broken"), output_folder(out, overwrite=True):
        pass
    assert listing(tmp_path) == ["out"]
    assert listing(out) == ["old.txt"]


def test_input_is_never_the_output(tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    (tmp_path / "link").symlink_to(source)
    for target in (source, source / "small", tmp_path / "link"):
        with pytest.raises(MoepressError, match="is the input folder or inside"):
            refuse_output(target, overwrite=True, source=source)
    contains = pytest.raises(MoepressError, match="contains the input folder")
    with contains, output_folder(tmp_path, overwrite=True, source=source):
        pass
    with output_folder(tmp_path / "model-small", source=source):  # the name begins the same, the folder is another
        pass


def test_a_link_keeps_pointing_to_its_target(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with output_folder(tmp_path / "link") as folder:
        (folder / "a").write_text("a")
    assert (tmp_path / "link").is_symlink()
    assert listing(tmp_path / "real") == ["a"]


def test_stale_folders_of_dead_runs_are_removed(tmp_path: Path) -> None:
    host = socket.gethostname()
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    stale = tmp_path / f".out.partial-{host}-{dead.pid}-abc"
    alive = tmp_path / f".out.partial-{host}-{os.getppid()}-abc"
    elsewhere = tmp_path / f".out.partial-another-host-{dead.pid}-abc"
    other = tmp_path / f".outer.partial-{host}-{dead.pid}-abc"
    for folder in (stale, alive, elsewhere, other):
        folder.mkdir()
    with output_folder(tmp_path / "out"):
        pass
    assert listing(tmp_path) == sorted(["out", alive.name, elsewhere.name, other.name])


def test_a_killed_run_leaves_no_finished_looking_folder(tmp_path: Path) -> None:
    program = (
        "import sys, time\nfrom moepress.checkpoint.folder import output_folder\n"
        "with output_folder(sys.argv[1], overwrite=True) as folder:\n"
        "    (folder / 'config.json').write_text('{}'); print('ready', flush=True); time.sleep(60)\n"
    )
    run = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "out")], stdout=subprocess.PIPE)
    assert run.stdout is not None and run.stdout.readline() == b"ready\n"
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert not (tmp_path / "out").exists()
    with output_folder(tmp_path / "out"):
        pass
    assert listing(tmp_path) == ["out"]


def test_a_run_killed_between_the_renames_is_undone_by_the_next(tmp_path: Path) -> None:
    (tmp_path / ".out.replaced").mkdir()
    (tmp_path / ".out.replaced" / "old.txt").write_text("old")
    with pytest.raises(RuntimeError), output_folder(tmp_path / "out") as folder:
        assert folder.exists()
        raise RuntimeError
    assert listing(tmp_path) == ["out"]
    assert listing(tmp_path / "out") == ["old.txt"]


def test_disk_full_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(MoepressError, match="the disk is full: only .* GB are left"), output_folder(tmp_path / "out"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert listing(tmp_path) == []


class ForeignError(Exception):
    """safetensors and tokenizers raise exceptions of their own."""


def test_disk_full_in_other_words() -> None:
    assert is_disk_full(ForeignError("Error while serializing: I/O error: No space left on device (os error 28)"))
    assert is_disk_full(OSError(errno.EDQUOT, "Disk quota exceeded"))
    assert not is_disk_full(OSError(errno.EACCES, "Permission denied"))
    assert not is_disk_full(ForeignError("Error while serializing: invalid header"))


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt" or not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounts a small disk")
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        with pytest.raises(MoepressError, match="the disk is full"), output_folder(disk / "out") as folder:
            save_file({"x": torch.zeros(1 << 20)}, folder / "model.safetensors")
        assert listing(disk) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_unwritable_parent(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MoepressError, match="cannot be made"), output_folder(tmp_path / "file" / "out"):
        pass


# ---- reading ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.bfloat16)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = tmp_path / "sharded"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    places = {}
    for i in (1, 2):
        name = f"model-0000{i}-of-00002.safetensors"
        save_file({f"w{i}": torch.zeros(8, 8)}, folder / name)
        places[f"w{i}"] = name
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def test_a_whole_checkpoint_passes(checkpoint: Path, sharded: Path) -> None:
    header = check_checkpoint(checkpoint)
    assert header["a"]["shape"] == [3]
    assert floating_dtypes(header) == {torch.float32, torch.bfloat16}
    assert set(check_checkpoint(sharded)) == {"w1", "w2"}


def test_what_is_not_a_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(MoepressError, match="does not exist"):
        check_checkpoint(tmp_path / "nowhere")
    with pytest.raises(MoepressError, match="is a file"):
        check_checkpoint(checkpoint / "model.safetensors")
    (checkpoint / "config.json").write_text('{"a": ')
    with pytest.raises(MoepressError, match="not valid JSON"):
        check_checkpoint(checkpoint)
    (checkpoint / "config.json").unlink()
    with pytest.raises(MoepressError, match="it has no config.json"):
        check_checkpoint(checkpoint)
    (checkpoint / "adapter_config.json").write_text("{}")
    with pytest.raises(MoepressError, match="PEFT adapter"):
        check_checkpoint(checkpoint)


def test_no_or_pickled_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(MoepressError, match="no weights"):
        check_checkpoint(checkpoint)
    (checkpoint / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(MoepressError, match="pickled"):
        check_checkpoint(checkpoint)


@pytest.mark.parametrize("keep", [0, 4, 8, 20, -1])
def test_a_truncated_file(checkpoint: Path, keep: int) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(MoepressError, match="damaged"):
        check_checkpoint(checkpoint)


@pytest.mark.parametrize("content", [b"\xff" * 64, (4).to_bytes(8, "little") + b"[1] " + b"x" * 9])
def test_a_file_of_something_else(checkpoint: Path, content: bytes) -> None:
    (checkpoint / "model.safetensors").write_bytes(content)
    with pytest.raises(MoepressError, match="damaged"):
        read_header(checkpoint / "model.safetensors")


def test_a_missing_or_wrong_shard(sharded: Path) -> None:
    second = sharded / "model-00002-of-00002.safetensors"
    save_file({"other": torch.zeros(1)}, second)
    with pytest.raises(MoepressError, match="does not hold w2"):
        check_checkpoint(sharded)
    second.unlink()
    with pytest.raises(MoepressError, match="1 of 2 shards are missing"):
        check_checkpoint(sharded)
    (sharded / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(MoepressError, match="no weight_map"):
        check_checkpoint(sharded)


# ---- companions ------------------------------------------------------------------------------------------------------


def test_companions(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "chat_template.jinja", "LICENSE", "preprocessor_config.json", "README.md", "x.bin"):
        (checkpoint / name).write_text(name)
    (checkpoint / "tokenizer.json").chmod(0o400)
    (checkpoint / "additional_chat_templates").mkdir()
    (checkpoint / "additional_chat_templates" / "tool.jinja").write_text("tool")
    (checkpoint / "original").mkdir()
    out = tmp_path / "out"
    out.mkdir()
    copied = copy_companions(checkpoint, out)
    assert copied == listing(out)
    assert copied == ["LICENSE", "additional_chat_templates", "chat_template.jinja", "preprocessor_config.json",
                      "tokenizer.json"]  # fmt: skip
    assert (out / "tokenizer.json").stat().st_mode & 0o200


def test_import_is_cheap() -> None:
    program = "import sys, moepress; sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    start = time.monotonic()
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
    assert time.monotonic() - start < 10


@pytest.mark.slow
def test_import_registers_before_and_after_transformers() -> None:
    check = "from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as m; assert 'moepress' in m"
    for program in (f"import moepress; {check}", f"import transformers.quantizers.auto, moepress; {check}"):
        assert subprocess.run([sys.executable, "-c", program]).returncode == 0
