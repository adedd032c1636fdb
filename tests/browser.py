"""A real browser for tests, through chromedriver's own protocol."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

AVAILABLE = all(map(shutil.which, ("chromedriver", "chromium")))


class Browser:
    def __init__(self, port: int) -> None:
        self.base = f"http://127.0.0.1:{port}"
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"]
        options = {"binary": shutil.which("chromium"), "args": arguments}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        made = self.call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.session = f"/session/{made['sessionId']}"

    def call(self, verb: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, {"Content-Type": "application/json"}, method=verb)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self.call("POST", f"{self.session}/goog/cdp/execute", {"cmd": command, "params": parameters})

    def open(self, page: Path, width: int = 1440, dark: bool = False) -> None:
        self.devtools("Emulation.setDeviceMetricsOverride", width=width, height=900,
                      deviceScaleFactor=1, mobile=width < 600)  # fmt: skip
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.devtools("Emulation.setEmulatedMedia", features=scheme)
        self.call("POST", f"{self.session}/url", {"url": page.resolve().as_uri()})

    def run(self, script: str) -> Any:
        return self.call("POST", f"{self.session}/execute/sync", {"script": script, "args": []})

    def point(self, x: float, y: float) -> None:
        self.devtools("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def log(self) -> list[str]:
        """What the console says, and what could not be loaded."""
        return [entry["message"] for entry in self.call("POST", f"{self.session}/se/log", {"type": "browser"})]

    def screenshot(self, file: Path, whole: bool = True) -> None:
        taken = self.devtools("Page.captureScreenshot", captureBeyondViewport=whole, format="png", **self._all(whole))
        file.write_bytes(base64.b64decode(taken["data"]))

    def _all(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.devtools("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}


@contextmanager
def browser() -> Iterator[Browser]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    opened = None
    try:
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        opened = Browser(port)
        yield opened
    finally:
        if opened is not None:
            opened.call("DELETE", opened.session)
        driver.terminate()
        driver.wait(10)
