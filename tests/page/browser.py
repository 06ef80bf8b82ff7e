"""A headless Chromium that is spoken to over a pipe: real keys, real pointers, no package besides the browser."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def installed() -> str | None:
    """The path of a Chromium; None where there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page of a browser, by the DevTools protocol. ``events`` are those since the last ``open``."""

    def __init__(self, program: str, profile: Path) -> None:
        from_us, to_browser = os.pipe()
        from_browser, to_us = os.pipe()
        # the browser reads from descriptor 3 and writes to 4
        line = f'exec "$0" "$@" 3<&{from_us} 4>&{to_us}'
        options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
        self._process = subprocess.Popen(
            [
                *("bash", "-c", line, program, *options),
                *("--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"),
            ],
            pass_fds=(from_us, to_us),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(from_us)
        os.close(to_us)
        self._write, self._read = os.fdopen(to_browser, "wb", 0), os.fdopen(from_browser, "rb", 0)
        self._rest, self._calls, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        self._calls += 1
        message: dict[str, Any] = {"id": self._calls, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._write.write(json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._calls:
            self.events.append(answer)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def open(self, path: Path, width: int, theme: str) -> None:
        """Load a file at a width, in the light or the dark theme."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": theme}
        self.call("Emulation.setEmulatedMedia", media="", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def as_printed(self) -> None:
        """Show what is open as it would be printed by somebody who uses the dark theme."""
        dark = {"name": "prefers-color-scheme", "value": "dark"}
        self.call("Emulation.setEmulatedMedia", media="print", features=[dark])

    def js(self, expression: str) -> Any:
        """The value of an expression in the page. Fails where it raises."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def key(self, name: str) -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Move the pointer with its button down."""
        for kind, (x, y) in (("mousePressed", start), ("mouseMoved", end), ("mouseReleased", end)):
            button = {"button": "left", "buttons": 1, "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def complaints(self) -> list[str]:
        """Errors on the console, exceptions, and requests for anything but the page itself."""
        found = []
        for event in self.events:
            method, data = event["method"], event["params"]
            if method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
                found.append(json.dumps(data))
            if method == "Network.requestWillBeSent" and not data["request"]["url"].startswith(("file:", "data:")):
                found.append(data["request"]["url"])
        return found

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._write.close()
        self._read.close()

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            block = self._read.read(65536)
            assert block, "the browser ended"
            self._rest += block
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)
