"""Headless Chromium through the DevTools protocol over a pipe: no driver, no port, nothing but the browser itself."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

WITHIN_S = 60.0
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-extensions", "--disable-background-networking", "--disable-sync", "--hide-scrollbars", "--mute-audio"),
    *("--disable-component-update", "--no-default-browser-check", "--remote-debugging-pipe"),
)


def find_browser() -> str | None:
    """The path of an installed Chromium or Chrome."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """A running browser. `failures`: exceptions, console errors and violations of the policy."""

    def __init__(self, program: str) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_read, self._out = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 20) for fd in os.pipe())
        self._in, to_write = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 20) for fd in os.pipe())

        def place() -> None:  # the browser reads commands from descriptor 3 and answers on 4
            os.dup2(to_read, 3)
            os.dup2(to_write, 4)

        command = [program, *FLAGS, f"--user-data-dir={self._folder.name}", "about:blank"]
        nothing = subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, stdin=nothing, stdout=nothing, stderr=nothing, preexec_fn=place, pass_fds=(3, 4)
        )
        os.close(to_read)
        os.close(to_write)
        self._held = b""
        self._number = 0
        self._session: str | None = None
        self.failures: list[str] = []
        self.requested: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)
        self._folder.cleanup()

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            part = os.read(self._in, 1 << 16)
            assert part, "the browser has ended"
            self._held += part
        message, _, self._held = self._held.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        method, given = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = given["exceptionDetails"]
            self.failures.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and given["type"] in ("error", "assert"):
            self.failures.append(str([each.get("value", each.get("description")) for each in given["args"]]))
        elif method == "Log.entryAdded" and given["entry"]["source"] in ("security", "javascript", "violation"):
            self.failures.append(given["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requested.append(given["request"]["url"])

    # -- a page

    def open(
        self, url: str, width: int = 1280, height: int = 800, scheme: str = "light", *, phone: bool = False
    ) -> None:
        """A new page of that size. `scheme`: light or dark, as the system asks for it."""
        self._session = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        scale = 2 if phone else 1
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )
        self.prefer(scheme)
        self.send("Page.navigate", url=url)
        self.until("location.href !== 'about:blank' && document.readyState === 'complete'")

    def reload(self) -> None:
        """Load the page again."""
        self.value("window.isOld = true")
        self.send("Page.reload")
        self.until("!window.isOld && document.readyState === 'complete'")

    def prefer(self, scheme: str) -> None:
        """Change the system's theme."""
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        given = {"expression": expression, "awaitPromise": True, "returnByValue": True, "userGesture": True}
        answer = self.send("Runtime.evaluate", **given)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str, within_s: float = WITHIN_S) -> None:
        """Return once `expression` is true."""
        deadline_s = time.monotonic() + within_s
        while not self.value(f"!!({expression})"):
            assert time.monotonic() < deadline_s, f"not within {within_s:g} s: {expression}; {self.failures}"
            time.sleep(0.01)

    def text(self, selector: str) -> str:
        """The text of the first element that matches; empty if there is none."""
        return str(self.value(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''"))

    def click(self, selector: str) -> None:
        """Press the mouse on an element, as a person does: what covers it gets the click."""
        self.until(f"document.querySelector({json.dumps(selector)})")
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        x, y = self.value(f"(() => {{ const b = {box}; return [b.x + b.width / 2, b.y + b.height / 2]; }})()")
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def choose_files(self, selector: str, *paths: Path) -> None:
        """Have a field for files hold these, as its dialog does."""
        found = self.send("Runtime.evaluate", expression=f"document.querySelector({json.dumps(selector)})")["result"]
        self.send("DOM.setFileInputFiles", files=[str(path) for path in paths], objectId=found["objectId"])

    def write(self, text: str) -> None:
        """Type into what has the focus."""
        self.send("Input.insertText", text=text)

    def press(self, key: str, code: str = "", *, alt: bool = False, shift: bool = False) -> None:
        """Press and release a key."""
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 and not alt else "")
        given: dict[str, Any] = {"key": key, "code": code or key, "modifiers": alt + 8 * shift}
        given["windowsVirtualKeyCode"] = {"Enter": 13, "Escape": 27, "ArrowUp": 38, "Tab": 9}.get(key, 0)
        self.send("Input.dispatchKeyEvent", type="keyDown", **given, **({"text": text} if text else {}))
        self.send("Input.dispatchKeyEvent", type="keyUp", **given)
