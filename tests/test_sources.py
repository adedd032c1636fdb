"""Where text comes from: files, the Hub, mixtures."""

import dataclasses
import json

import pytest

from moepress.data import read_documents
from moepress.data.spec import parse_hub, parse_sources, shares
from moepress.errors import MoepressError

from .texts import write

# ---- files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.xz"])
def test_documents_of_json_lines(tmp_path, name):
    path = write(tmp_path / name, [{"text": "one"}, {"text": "two", "domain": "news"}])
    assert [(d.text, d.domain) for d in read_documents(path)] == [("one", "a"), ("two", "news")]


def test_documents_of_json_and_text(tmp_path):
    (tmp_path / "b.json").write_text(json.dumps([{"body": "one"}]))
    (tmp_path / "c.txt").write_text("a whole\n\nbook")
    assert [d.text for d in read_documents(str(tmp_path / "b.json"), text_field="body")] == ["one"]
    assert [d.text for d in read_documents(str(tmp_path / "c.txt"))] == ["a whole\n\nbook"]


def test_splits(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"text": "one", "split": "train"}, {"text": "two", "split": "validation"}])
    assert [d.text for d in read_documents(path, split="validation")] == ["two"]
    with pytest.raises(MoepressError, match="no records of split 'test'; it has train, validation"):
        list(read_documents(path, split="test"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "a.jsonl is empty"),
        ("\n\n", "a.jsonl is empty"),
        ('{"text": "x"}\n{"text": ', "a.jsonl, line 2 is not JSON"),
        ('{"text": "x"}\n[1]\n', "a.jsonl, line 2: expected an object"),
        ('{"txt": "x", "id": 1}\n', r"line 1: there is no field 'text' \(found: txt, id\); did you mean 'txt'"),
        ('{"text": 3}\n', "line 1, field 'text': expected a text or a list of messages, found int"),
    ],
)
def test_bad_files(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(MoepressError, match=message):
        list(read_documents(str(tmp_path / "a.jsonl")))


def test_missing_and_strange_files(tmp_path):
    write(tmp_path / "books.jsonl", [{"text": "x"}])
    with pytest.raises(MoepressError, match="there is no file .*bocks.jsonl: did you mean 'books.jsonl'"):
        list(read_documents(str(tmp_path / "bocks.jsonl")))
    with pytest.raises(MoepressError, match="is a folder"):
        list(read_documents(str(tmp_path)))
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(MoepressError, match="text is read from .jsonl, .json, .txt"):
        list(read_documents(str(tmp_path / "a.parquet")))
    (tmp_path / "a.jsonl.gz").write_text("not packed")
    with pytest.raises(MoepressError, match="damaged or not packed"):
        list(read_documents(str(tmp_path / "a.jsonl.gz")))
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(MoepressError, match="is not UTF-8"):
        list(read_documents(str(tmp_path / "latin.txt")))


def test_hub_offline():
    pytest.importorskip("datasets")
    with pytest.raises(MoepressError, match="the Hub cannot be reached for dataset 'org/name'"):
        list(read_documents("hub:org/name:train"))


@pytest.mark.parametrize(
    ("location", "parsed"),
    [
        ("org/name:train", ("org/name", None, "train", None)),
        ("org/name:en:train", ("org/name", "en", "train", None)),
        ("org/name:train_sft:messages", ("org/name", None, "train_sft", "messages")),
        ("org/name:en:train:body", ("org/name", "en", "train", "body")),
        ("org/name:en:odd", ("org/name", "en", "odd", None)),
    ],
)
def test_hub_names(location, parsed):
    assert dataclasses.astuple(parse_hub(location)) == parsed


@pytest.mark.parametrize("location", ["org/name", "org/name:en", ":train", "a/b:c:d:e:f"])
def test_bad_hub_names(location):
    with pytest.raises(MoepressError, match="write hub:org/name:split"):
        parse_hub(location)


# ---- mixtures ---------------------------------------------------------------------------------------------------


def test_mixtures():
    sources = parse_sources("a.jsonl:3, hub:org/name:train:1")
    assert [(s.kind, s.location, s.name, s.weight) for s in sources] == [
        ("file", "a.jsonl", "a", 0.75),
        ("hub", "org/name:train", "name", 0.25),
    ]
    assert [s.weight for s in parse_sources("a.jsonl,task:sst2@/some/folder")] == [0.5, 0.5]
    assert [s.name for s in parse_sources("x/a.jsonl,y/a.jsonl")] == ["x/a.jsonl", "y/a.jsonl"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("a.jsonl:0,b.jsonl:1", "weight of 'a.jsonl' must be a positive number, not 0"),
        ("a.jsonl:-1,b.jsonl:1", "must be a positive number"),
        ("a.jsonl:nan,b.jsonl:1", "must be a positive number"),
        ("a.jsonl,b.jsonl:1", "has no weight for 'a.jsonl'"),
        ("a.jsonl,,b.jsonl", "empty part"),
        ("a.jsonl,a.jsonl", "same source twice"),
        (" ", "no text is named"),
    ],
)
def test_bad_mixtures(spec, message):
    with pytest.raises(MoepressError, match=message):
        parse_sources(spec)


def test_shares_sum_up():
    assert shares(parse_sources("a.txt:1,b.txt:1,c.txt:1"), 256) == [86, 85, 85]
    with pytest.raises(MoepressError, match="gives it none of 4 samples"):
        shares(parse_sources("a.txt:1,b.txt:99"), 4)
