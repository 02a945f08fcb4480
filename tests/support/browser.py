"""Debian's chromium without a window, driven over the pipe of its DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.waiting import eventually

CHROMIUM = shutil.which("chromium")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
CALL_SECONDS = 60.0
KEYS = {"Tab": 9, "Enter": 13, " ": 32}


class Page:
    """One tab. complaints: what its console and its exceptions said."""

    def __init__(self, folder: Path, width: int, height: int) -> None:
        self.complaints: list[str] = []
        self._last, self._unread, self._session = 0, b"", ""
        command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={folder}", f"--window-size={width},{height}"]
        command += ["--remote-debugging-pipe", "about:blank"]
        self._reading, self._writing, self._process = _start(command)

    def attach(self) -> None:
        """Before anything else."""
        eventually(lambda: bool(self._pages()), "chromium shows no page")
        (target,) = self._pages()
        attached = self.call("Target.attachToTarget", {"targetId": target["targetId"], "flatten": True})
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable", {})

    def _pages(self) -> list[dict[str, Any]]:
        return [t for t in self.call("Target.getTargets", {})["targetInfos"] if t["type"] == "page"]

    def prefer(self, scheme: str) -> None:
        """light or dark."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", {"features": [feature]})

    def call(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        """One command of the protocol; raises RuntimeError with its words."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._read()
            if reply.get("id") == self._last:
                if "error" in reply:
                    raise RuntimeError(f"{method}: {reply['error']}")
                return reply["result"]
            self._hear(reply)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._reading], [], [], CALL_SECONDS)
            part = os.read(self._reading, 1 << 16) if ready else b""
            if not part:
                raise RuntimeError(f"chromium has ended or said nothing for {CALL_SECONDS:.0f} s")
            self._unread += part
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    def _hear(self, event: dict[str, Any]) -> None:
        if event.get("method") in (
            "Runtime.exceptionThrown",
            "Runtime.consoleAPICalled",
            "Log.entryAdded",
        ):
            self.complaints.append(json.dumps(event["params"]))

    def open(self, url: str) -> None:
        self.call("Page.navigate", {"url": url})
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, script: str) -> Any:
        """The value of an expression; raises RuntimeError if it throws."""
        done = self.call("Runtime.evaluate", {"expression": script, "returnByValue": True})
        if "exceptionDetails" in done:
            raise RuntimeError(f"{script}: {done['exceptionDetails']}")
        return done["result"].get("value")

    def text(self, selector: str) -> str:
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent")

    def wait_for(self, condition: str, seconds: float = 60.0) -> None:
        """Until the expression is true; raises TimeoutError with the page's text."""
        limit = time.monotonic() + seconds
        while not self.evaluate(condition):
            if time.monotonic() > limit:
                raise TimeoutError(f"{condition}: {self.evaluate('document.body.innerText')}")
            time.sleep(0.02)

    def click(self, selector: str) -> None:
        """With the mouse, in its middle."""
        box = self.evaluate(
            f"(() => {{ const found = document.querySelector({json.dumps(selector)}); found.scrollIntoView();"
            "const box = found.getBoundingClientRect();"
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            place = {"x": box[0], "y": box[1], "button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", {"type": kind, **place})

    def press(self, key: str) -> None:
        code = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": KEYS[key]}
        written = {"Enter": {"text": "\r"}, " ": {"text": " "}}.get(key, {})
        self.call("Input.dispatchKeyEvent", {"type": "keyDown", **code, **written})
        self.call("Input.dispatchKeyEvent", {"type": "keyUp", **code})

    def write(self, text: str) -> None:
        """In place of what the focused field has."""
        self.evaluate("document.activeElement.select()")
        self.call("Input.insertText", {"text": text})

    def screenshot(self, path: Path, first: str, last: str) -> None:
        """A PNG of the page's full width, from the top of one element to the bottom of another. first, last: their selectors."""
        edges = (
            f"document.querySelector('{first}').getBoundingClientRect().top + scrollY",
            f"document.querySelector('{last}').getBoundingClientRect().bottom + scrollY",
            "innerWidth",
        )
        top, bottom, width = (float(self.evaluate(edge)) for edge in edges)
        clip = {"x": 0, "y": top, "width": width, "height": bottom - top, "scale": 1}
        wanted = {"format": "png", "captureBeyondViewport": True, "clip": clip}
        done = self.call("Page.captureScreenshot", wanted)
        path.write_bytes(base64.b64decode(done["data"]))

    def close(self) -> None:
        os.close(self._writing)
        os.close(self._reading)
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _start(command: list[str]) -> tuple[int, int, subprocess.Popen]:
    """What chromium writes, what it reads. It reads from descriptor 3 and writes to 4; a shell puts them there."""
    its_input, writing = os.pipe()
    reading, its_output = os.pipe()
    shell = ["bash", "-c", f'exec "$@" 3<&{its_input} 4>&{its_output}', "chromium", *command]
    process = subprocess.Popen(
        shell,
        pass_fds=[its_input, its_output],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(its_input)
    os.close(its_output)
    return reading, writing, process


@contextlib.contextmanager
def browsing(folder: Path, width: int = 1200, height: int = 1000) -> Iterator[Page]:
    """folder: of its profile."""
    page = Page(folder, width, height)
    try:
        page.attach()
        yield page
    finally:
        page.close()
