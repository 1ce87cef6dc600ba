"""A real browser, driven by the DevTools protocol over two pipes: messages are JSON, each ended by a NUL.

with Chromium() as browser:
    tab = browser.open(path, width=390, dark=True)
    tab.evaluate("document.title")
"""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SWITCHES = (
    "--headless=new",
    "--no-sandbox",  # root, as in CI's containers, has none; the pages are our own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-pipe",
)
# The browser reads from 3 and writes to 4; the pipes' own numbers may be in the way of that, so they move up first.
LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD_CLOEXEC, 10) for end in sys.argv[1:3]]
for end, place in zip(ends, (3, 4)):
    os.dup2(end, place)
os.execv(sys.argv[3], sys.argv[3:])
"""
HEIGHT = 900  # of a window
PATIENCE = 60  # seconds for one answer, on a machine that is busy with other things


def executable() -> str | None:
    """The path of a browser, or None."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Chromium:
    """A browser process of its own, with a profile that is thrown away."""

    def __init__(self) -> None:
        program = executable()
        assert program is not None
        self._profile = tempfile.TemporaryDirectory(prefix="alignattn-browser-", ignore_cleanup_errors=True)
        read_there, self._write = os.pipe()
        self._read, write_there = os.pipe()

        profile = f"--user-data-dir={self._profile.name}"
        ends = str(read_there), str(write_there)
        self._process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, *ends, program, *SWITCHES, profile, "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(read_there, write_there),
        )
        os.close(read_there)
        os.close(write_there)
        self._numbers = itertools.count(1)
        self._buffer = b""
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.call("Browser.close")
            self._process.wait(10)
        except (OSError, RuntimeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        os.close(self._write)
        self._profile.cleanup()

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Ask the browser for something and wait for its answer; what it tells meanwhile is kept in `events`."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        waiting = memoryview(json.dumps(message).encode() + b"\0")
        while waiting:
            waiting = waiting[os.write(self._write, waiting) :]
        while True:
            answer = self._receive()
            if answer.get("id") != number:
                self.events.append(answer)
            elif "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']['message']}")
            else:
                return answer["result"]

    def wait_for(self, method: str, session: str) -> dict[str, Any]:
        """The first event of this name, also if it has come already."""
        seen = 0
        while True:
            for event in self.events[seen:]:
                if event.get("method") == method and event.get("sessionId") == session:
                    return event["params"]
            seen = len(self.events)
            self.events.append(self._receive())

    def _receive(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            chunk = os.read(self._read, 1 << 16) if ready else b""
            if not chunk:
                raise RuntimeError("The browser has ended." if ready else f"No word from the browser in {PATIENCE} s.")
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def open(self, path: Path, *, width: int = 1280, dark: bool = False, script: bool = True) -> "Tab":
        """A page in a tab of its own, loaded."""
        tab = Tab(self, width, HEIGHT, dark=dark, script=script)
        tab.go(path.resolve().as_uri())
        return tab


class Tab:
    """One page, and all it has said and asked for."""

    def __init__(self, browser: Chromium, width: int, height: int, *, dark: bool, script: bool) -> None:
        self.browser = browser
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Audits"):
            self.call(f"{domain}.enable")
        # Of the width and scheme alone: `mobile` would let a page that is too wide shrink instead of overflow.
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        if not script:
            self.call("Emulation.setScriptExecutionDisabled", value=True)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **parameters)

    def go(self, address: str) -> None:
        self.call("Page.navigate", url=address)
        self.browser.wait_for("Page.loadEventFired", self.session)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str, text: str = "") -> None:
        code = {"Enter": 13, "Tab": 9, " ": 32}[key]
        held = {"key": key, "windowsVirtualKeyCode": code, "code": "Space" if key == " " else key}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **held)
        self.call("Input.dispatchKeyEvent", type="keyUp", **held)

    def complaints(self) -> list[str]:
        """Errors, warnings, exceptions, dialogs and violations of the policy, up to now."""
        self.evaluate("new Promise(done => setTimeout(done, 50))")  # what was under way has then been told
        told = []
        for event in self.browser.events:
            if event.get("sessionId") != self.session:
                continue
            method, values = event["method"], event["params"]
            if method == "Runtime.exceptionThrown":
                told.append(f"exception: {values['exceptionDetails']}")
            elif method == "Runtime.consoleAPICalled":
                told.append(f"console: {values['args']}")
            elif method == "Log.entryAdded":
                told.append(f"log: {values['entry']['text']}")
            elif method == "Audits.issueAdded":
                told.append(f"issue: {values['issue']}")
            elif method == "Page.javascriptDialogOpening":
                told.append(f"dialog: {values['message']}")
        return told

    def requests(self) -> list[str]:
        """Addresses that were asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self.browser.events
            if event.get("sessionId") == self.session and event["method"] == "Network.requestWillBeSent"
        ]

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=whole, format="png")["data"]
        path.write_bytes(base64.b64decode(picture))

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])
