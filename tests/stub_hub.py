"""A Hub on 127.0.0.1 that keeps what is uploaded: as much of the real one's protocol as huggingface_hub uses here.

It is no proof that the real Hub does the same; it shows what huggingface_hub was asked to do.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import pytest
from huggingface_hub import constants

LARGE = ("*.safetensors", "*.png")


@dataclass
class Repository:
    private: bool = False
    gated: bool = False
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    commits: list[str] = field(default_factory=list)
    """Their messages."""

    def sha(self, branch: str) -> str:
        digest = hashlib.sha1()
        for name, content in sorted(self.branches[branch].items()):
            digest.update(name.encode() + hashlib.sha1(content).digest())
        return digest.hexdigest()

    def branch(self, revision: str) -> str | None:
        return next((name for name in self.branches if revision in (name, self.sha(name))), None)


class Hub:
    """`me` may write with the token `good`, and read with `weak`."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}
        self.broken = ""
        """Requests whose path contains this are answered with an error of the server."""
        self.asked: list[str] = []
        self.address = ""


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.handle_request()

    do_POST = do_PUT = do_HEAD = do_GET

    def answer(self, content: Any = None, status: int = 200, **headers: str) -> None:
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)

    def refuse(self, status: int, message: str, code: str = "") -> None:
        self.answer({"error": message}, status, X_Error_Message=message, **({"X_Error_Code": code} if code else {}))

    def handle_request(self) -> None:
        hub, parts = self.hub, urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        hub.asked.append(f"{self.command} {parts.path}")
        if hub.broken and hub.broken in parts.path:
            return self.refuse(500, "the stub is broken")
        if token and token not in ("good", "weak"):
            return self.refuse(401, "Invalid credentials in Authorization header")
        if parts.path.startswith("/large/"):
            hub.large[parts.path.removeprefix("/large/")] = body
            return self.answer({})
        if parts.path == "/api/whoami-v2":
            if not token:
                return self.refuse(401, "Invalid username or password.")
            role = "write" if token == "good" else "read"
            return self.answer({"name": "me", "orgs": [], "auth": {"accessToken": {"role": role}}})
        if self.command == "POST" and token != "good":
            return self.refuse(403, "this token may only read")
        if parts.path == "/api/repos/create":
            return self.create(json.loads(body))
        if parts.path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        found = re.fullmatch(r"(?:/api/models)?/([\w.-]+/[\w.-]+?)(?:\.git)?(/.*)?", parts.path)
        repository = hub.repositories.get(found[1]) if found else None
        if found is None or repository is None or (repository.private and not token):
            return self.refuse(404, "Repository not found", "RepoNotFound")
        if repository.gated:
            return self.refuse(403, "Access to this model is restricted", "GatedRepo")
        self.inside(found[1], repository, found[2] or "", body)

    def create(self, asked: dict[str, Any]) -> None:
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        if not name.startswith("me/"):
            return self.refuse(403, f"You don't have the rights to create a model under {name.partition('/')[0]}")
        known = name in self.hub.repositories
        private = asked.get("private") or asked.get("visibility") == "private"
        self.hub.repositories.setdefault(name, Repository(private=bool(private)))
        self.answer({"url": f"{self.hub.address}/{name}", "name": name}, 409 if known else 200)

    def inside(self, name: str, repository: Repository, rest: str, body: bytes) -> None:
        verb, revision, *more = [*rest.split("/")[1:], *["", "main"][rest.count("/") :]]
        path = "/".join(more)
        if verb == "info":
            return self.batch(json.loads(body))
        if verb == "branch":
            known = revision in repository.branches
            repository.branches.setdefault(revision, dict(repository.branches["main"]))
            return self.answer({}, 409 if known else 200)
        branch = repository.branch(revision)
        if branch is None:
            return self.refuse(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        files = repository.branches[branch]
        if verb in ("", "revision"):
            listed = [{"rfilename": file} for file in files]
            self.answer({"id": name, "sha": repository.sha(branch), "private": repository.private, "siblings": listed})
        elif verb == "tree":
            self.answer([{"type": "file", "path": file, **described(content)} for file, content in files.items()])
        elif verb == "preupload":
            asked = json.loads(body)["files"]
            modes = [{"path": one["path"], "shouldIgnore": False, "uploadMode": mode(one["path"])} for one in asked]
            self.answer({"files": modes})
        elif verb == "commit":
            self.commit(name, repository, branch, [json.loads(line) for line in body.splitlines()])
        elif verb == "resolve" and path in files:
            commit = {"ETag": f'"{described(files[path])["oid"]}"', "X_Repo_Commit": repository.sha(branch)}
            self.answer(files[path], **commit)
        else:
            self.refuse(404, f"{rest} is not here", "EntryNotFound")

    def batch(self, asked: dict[str, Any]) -> None:
        objects = []
        for one in asked["objects"]:
            wanted = {"upload": {"href": f"{self.hub.address}/large/{one['oid']}"}}
            objects.append(one | ({} if one["oid"] in self.hub.large else {"actions": wanted}))
        self.answer({"transfer": "basic", "objects": objects})

    def commit(self, name: str, repository: Repository, branch: str, lines: list[dict[str, Any]]) -> None:
        files = dict(repository.branches[branch])
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                repository.commits.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                content = self.hub.large[value["oid"]]
                assert hashlib.sha256(content).hexdigest() == value["oid"]
                files[value["path"]] = content
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        repository.branches[branch] = files
        sha = repository.sha(branch)
        self.answer({"commitUrl": f"{self.hub.address}/{name}/commit/{sha}", "commitOid": sha, "success": True})


def mode(path: str) -> str:
    return "lfs" if any(fnmatch(path, pattern) for pattern in LARGE) else "regular"


def described(content: bytes) -> dict[str, Any]:
    return {"size": len(content), "oid": hashlib.sha1(content).hexdigest()}


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(name="hub")
def stub_hub(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The only Hub there is, with a cache of its own, and nobody logged in."""
    with serving() as found:
        address(monkeypatch, found.address)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        yield found


def address(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
