"""Headless Chromium, driven through its pipe: DevTools messages as JSON, each ended by a zero."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

__all__ = ["CHROMIUM", "Browser", "open_browser"]

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
_KEYS = {
    "Tab": {"windowsVirtualKeyCode": 9},
    "Enter": {"windowsVirtualKeyCode": 13, "text": "\r"},
    "ArrowDown": {"windowsVirtualKeyCode": 40},
}


class Browser:
    """One page in one browser."""

    def __init__(self, reader: Any, writer: Any) -> None:
        self._reader, self._writer = reader, writer
        self._next, self._session = 0, ""
        self.errors: list[str] = []  # console errors, exceptions, violations of the page's policy
        self.requests: list[str] = []  # URLs
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        found = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._next += 1
        message = {"id": self._next, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._writer.write(json.dumps(message).encode() + b"\0")
        self._writer.flush()
        while True:
            answer = self._read()
            if answer.get("id") == self._next:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        data = bytearray()
        while (byte := self._reader.read(1)) != b"\0":
            assert byte, "the browser has gone"
            data += byte
        message = json.loads(data)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, found: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(found["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and found["type"] in ("error", "warning"):
            self.errors.append(str(found["args"]))
        elif method == "Log.entryAdded" and found["entry"]["level"] in ("error", "warning"):
            self.errors.append(found["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(found["request"]["url"])

    def open(self, page: Path) -> None:
        """Load a page and wait until it stands."""
        self._call("Page.navigate", url=page.as_uri())
        for _ in range(200):
            if self.value("document.readyState") == "complete" and self.value("location.protocol"):
                break
            time.sleep(0.05)
        assert self.value("document.readyState") == "complete"

    def value(self, expression: str) -> Any:
        """What an expression gives in the page."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """One key, down and up."""
        settings = {"key": key, "code": key, **_KEYS[key]}
        self._call("Input.dispatchKeyEvent", type="keyDown", **settings)
        self._call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)

    def write(self, text: str) -> None:
        """Text into what has the focus."""
        self._call("Input.insertText", text=text)

    def tab_to(self, condition: str) -> None:
        """Press Tab until the focused element `e` fulfils a condition."""
        for _ in range(150):
            self.press("Tab")
            if self.value(f"(e => Boolean({condition}))(document.activeElement)"):
                return
        raise AssertionError(f"not reached by Tab: {condition}")

    def media(self, kind: str = "screen", scheme: str = "light") -> None:
        """Screen or print, light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", media=kind, features=features)

    def resize(self, width: int, height: int) -> None:
        """The size of a telephone's screen, say, in CSS pixels."""
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": True}
        self._call("Emulation.setDeviceMetricsOverride", **screen)

    def pdf(self) -> bytes:
        """The page as printed."""
        return base64.b64decode(self._call("Page.printToPDF")["data"])


@contextmanager
def open_browser() -> Iterator[Browser]:
    """A browser with a profile of its own; ended with the block."""
    assert CHROMIUM is not None
    to_child, ours_out = os.pipe()
    ours_in, from_child = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu"]
        command += ["--disable-dev-shm-usage", "--no-first-run", "--remote-debugging-pipe"]
        command += ["--disable-background-networking", f"--user-data-dir={profile}"]
        # The browser reads from descriptor 3 and writes to 4.
        shell = f'exec "$@" 3<&{to_child} 4>&{from_child}'
        process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command],
            pass_fds=(to_child, from_child),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        os.close(to_child)
        os.close(from_child)
        try:
            with os.fdopen(ours_in, "rb") as reader, os.fdopen(ours_out, "wb") as writer:
                yield Browser(reader, writer)
                with suppress(OSError, AssertionError):
                    writer.write(b'{"id":0,"method":"Browser.close"}\0')
        finally:
            process.terminate()
            process.wait(20)
