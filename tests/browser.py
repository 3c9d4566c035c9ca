"""A headless Chromium, driven through its debugging pipe, so that no library is needed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


class Browser:
    """One page; `complaints` has what its console said with the level of an error."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        here, browser_out = os.pipe()
        browser_in, there = os.pipe()
        flags = (
            "--headless --no-sandbox --disable-gpu --hide-scrollbars --remote-debugging-pipe"
        )
        command = f'exec "$0" {flags} --user-data-dir="$1" 3<&{browser_in} 4>&{browser_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, CHROMIUM, str(profile)],
            pass_fds=(browser_in, browser_out),
            stderr=subprocess.DEVNULL,
        )
        os.close(browser_in)
        os.close(browser_out)
        self._read, self._write = os.fdopen(here, "rb"), os.fdopen(there, "wb")
        self._last, self._session, self._rest = 0, None, b""
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Runtime", "Page", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: object) -> dict[str, Any]:
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._write.write(json.dumps(message).encode() + b"\0")
        self._write.flush()
        while True:
            answer = self._next()
            result: dict[str, Any] = answer.get("result", {})
            if answer.get("id") == self._last:
                assert "error" not in answer, answer["error"]
                return result
            said = answer.get("params", {})
            if answer.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(said["exceptionDetails"])[:500])
            elif answer.get("method") == "Log.entryAdded" and said["entry"]["level"] == "error":
                self.complaints.append(said["entry"]["text"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._read.fileno(), 2**16)
            assert more, "the browser has ended"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        parsed: dict[str, Any] = json.loads(message)
        return parsed

    def value(self, script: str) -> Any:  # noqa: ANN401
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, script: str, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not self.value(script):
            assert time.monotonic() < deadline, f"never: {script}"
            time.sleep(0.02)

    def screenshot(self, path: Path, width: int, *, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def serious_findings(self, folder: Path) -> list[object]:
        """Serious findings of axe at both widths, light and dark; skips without axe."""
        if not (axe := os.environ.get("EDGEGOSSIP_AXE")):
            pytest.skip("set EDGEGOSSIP_AXE to axe.min.js, from `npm install axe-core`")
        self.value("document.querySelectorAll('details').forEach(each => each.open = true)")
        self.value(Path(axe).read_text(encoding="utf-8") + "; 0")
        serious: list[object] = []
        for width, dark in ((400, False), (400, True), (1400, False), (1400, True)):
            self.screenshot(folder / "shot.png", width, dark=dark)
            self.value("window.found = null; axe.run().then(all => window.found = all); 0")
            self.until("window.found !== null")
            findings = json.loads(self.value("JSON.stringify(window.found.violations)"))
            serious += [
                (
                    width,
                    dark,
                    each["id"],
                    [node["failureSummary"] for node in each["nodes"]][:5],
                )
                for each in findings
                if each["impact"] in ("serious", "critical")
            ]
        return serious

    def close(self) -> None:
        with suppress(AssertionError, OSError):
            self._session = None
            self.call("Browser.close")
        self._write.close()
        self._read.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
