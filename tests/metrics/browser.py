"""A headless Chromium, spoken to by its DevTools protocol over a pipe: a page as a reader's browser has it.

The browser ends when the pipe does, so that none is left behind by a test that was killed.
"""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PATIENCE_SEC = 100.0
"""Of a machine that is very busy."""
NAMES = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str | None:
    """The browser's program; None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One tab of a browser. Since the last `open`: `errors`, what its script threw and what its policy refused, and
    `requests`, the URLs that it asked for."""

    def __init__(self, commands: int, answers: int) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._commands, self._answers = commands, answers
        self._numbers = itertools.count(1)
        self._unread = bytearray()
        self._loaded = False
        self._session: dict[str, str] = {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol. Raises `RuntimeError` where the browser refuses it, `TimeoutError` after
        `PATIENCE_SEC` without a word."""
        number = next(self._numbers)
        said = json.dumps({"id": number, "method": method, "params": parameters} | self._session)
        os.write(self._commands, said.encode() + b"\0")
        while (answer := self._next()).get("id") != number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return dict(answer["result"])

    def open(self, page: str) -> None:
        """Load a page, and wait until its script is ready. Raises as `until`."""
        self.errors.clear()
        self.requests.clear()
        self._loaded = False
        self.call("Page.navigate", url=page)
        while not self._loaded:
            self._next()
        self.until("document.documentElement.dataset.ready")

    def run(self, script: str) -> Any:
        """The value of an expression in the page, awaited. Raises `RuntimeError` for what it throws."""
        done = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in done:
            raise RuntimeError(json.dumps(done["exceptionDetails"]))
        return done["result"].get("value")

    def until(self, script: str) -> Any:
        """The first true value of an expression, looked for after each frame (true for a node). Raises `RuntimeError`
        where the page has an error instead, `TimeoutError` after `PATIENCE_SEC`."""
        look = (
            f"new Promise(requestAnimationFrame).then(() => {script}).then((it) => it instanceof Node || it)"
        )
        end = time.monotonic() + PATIENCE_SEC
        while not (value := self.run(look)):
            if self.errors:
                raise RuntimeError(str(self.errors))
            if time.monotonic() > end:
                raise TimeoutError(script)
        return value

    def press(self, key: str) -> None:
        """One key, down and up."""
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)

    def window(self, width: int, height: int, *, dark: bool = False, mobile: bool = False) -> None:
        """Size and colour scheme of the window."""
        size = {"width": width, "height": height, "mobile": mobile, "deviceScaleFactor": 1}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media="", features=[scheme])

    def screenshot(self) -> bytes:
        """What the window shows, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def _next(self) -> dict[str, Any]:
        """The browser's next message."""
        while (end := self._unread.find(b"\0")) < 0:
            if not select.select([self._answers], [], [], PATIENCE_SEC)[0]:
                raise TimeoutError("the browser says nothing")
            if not (read := os.read(self._answers, 1 << 20)):
                raise RuntimeError("the browser is gone")
            self._unread += read
        said: dict[str, Any] = json.loads(self._unread[:end])
        del self._unread[: end + 1]
        self._hear(said.get("method", ""), said.get("params", {}))
        return said

    def _hear(self, method: str, said: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(said["exceptionDetails"]))
        elif method == "Log.entryAdded" and said["entry"]["level"] == "error":
            self.errors.append(json.dumps(said["entry"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A Chromium with its profile in the directory `profile`; without its sandbox, which root cannot have."""
    program = chromium()
    assert program
    their_commands, commands = os.pipe()
    answers, their_answers = os.pipe()
    # Chromium reads from descriptor 3 and writes to 4, which may be taken here: first out of their way.
    theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (their_commands, their_answers)]
    os.close(their_commands)
    os.close(their_answers)

    def take() -> None:
        os.dup2(theirs[0], 3)
        os.dup2(theirs[1], 4)

    process = subprocess.Popen(
        [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
         "--disable-crash-reporter", "--remote-debugging-pipe", f"--user-data-dir={profile}", "--hide-scrollbars"],
        pass_fds=(3, 4), preexec_fn=take, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    for end in theirs:
        os.close(end)
    try:
        yield Browser(commands, answers)
    finally:
        os.close(commands)
        os.close(answers)
        process.terminate()
        process.wait()
