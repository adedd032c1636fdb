"""Small files of text for tests."""

import gzip
import json
import lzma


def words(*ids):
    """A text whose tokens, for `word_tokenizer`, are these ids."""
    return " ".join(f"w{i}" for i in ids)


def write(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    opened = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)(path, "wt")
    with opened as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    return str(path)
