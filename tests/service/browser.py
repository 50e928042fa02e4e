"""A headless Chromium, driven over the two pipes of its DevTools protocol: no library, and no port."""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tests.harness import WAIT_SECONDS, wait_until

_KEYS: Final = {
    "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40,
    "Home": 36, "End": 35, "Enter": 13, "Tab": 9, " ": 32,
}  # fmt: skip
"""Keys by name, and their virtual codes."""
# The protocol is spoken on descriptors 3 and 4. These may be other ones here, so that a small program moves them.
_START: Final = """
import fcntl, os, sys
theirs = [fcntl.fcntl(int(one), fcntl.F_DUPFD, 10) for one in sys.argv[1:3]]
os.dup2(theirs[0], 3)
os.dup2(theirs[1], 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""
_OPTIONS: Final = (
    *("--headless=new", "--no-sandbox", "--remote-debugging-pipe", "--disable-gpu"),
    *("--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars", "--mute-audio"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-extensions", "--disable-default-apps", "--window-size=1440,1000"),
)

_NAVIGATED: Final = (
    "Inspected target navigated or closed",
    "Execution context was destroyed.",
    "Cannot find default execution context",
)


def _shown(selector: str) -> str:
    one = f"document.querySelector({json.dumps(selector)})"
    return f"{one}?.checkVisibility() ? {one}.innerText : ''"


class NavigatedError(Exception):
    """A command came to no end, because the page went to another address or was loaded again meanwhile."""


class Browser:
    """One Chromium process with one page.

    Args:
        folder: an empty folder, for what it keeps.

    Attributes:
        complaints: exceptions of the page's code, and errors that its console shows.
        requested: the addresses that it asked for.
    """

    def __init__(self, folder: Path) -> None:
        program = shutil.which("chromium")
        assert program is not None, "tools/dev.py test --all installs it"
        self.complaints: list[str] = []
        self.requested: list[str] = []
        self._number = 0
        self._answers: dict[int, Any] = {}
        self._rest = b""
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        fcntl.fcntl(self._in, fcntl.F_SETFL, os.O_NONBLOCK)
        # HOME, because Chromium writes there whatever it is told to keep elsewhere.
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-c", _START, str(theirs_in), str(theirs_out), program),
                *(*_OPTIONS, f"--user-data-dir={folder}", "about:blank"),
            ],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": str(folder)},
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._session = ""
        try:
            target = self.send("Target.createTarget", url="about:blank")["targetId"]
            attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
            self._session = attached["sessionId"]
            for domain in ("Runtime", "Log", "Network", "Page"):
                self.send(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End it, and all its processes."""
        os.close(self._out)
        os.close(self._in)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def send(self, method: str, **parameters: Any) -> Any:
        """Send a command of the protocol, and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + WAIT_SECONDS
        while self._number not in self._answers:
            assert time.monotonic() < deadline, f"no answer to {method}"
            self._receive()
        answer = self._answers.pop(self._number)
        if answer.get("error", {}).get("message") in _NAVIGATED:
            raise NavigatedError(method)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _receive(self) -> None:
        try:
            data = os.read(self._in, 2**20)
        except BlockingIOError:
            time.sleep(0.002)
            return
        assert data, "the browser ended"
        *whole, self._rest = (self._rest + data).split(b"\0")
        for one in map(json.loads, whole):
            if "id" in one:
                self._answers[one["id"]] = one
            else:
                self._happened(one["method"], one["params"])

    def _happened(self, event: str, about: Mapping[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            found = about["exceptionDetails"]
            words = found.get("exception", {}).get("description", found["text"])
            self.complaints.append(words)
        elif event == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.complaints.append(f"{about['entry']['text']} {about['entry'].get('url', '')}")
        elif event == "Network.requestWillBeSent":
            self.requested.append(about["request"]["url"])

    def open(self, url: str) -> None:
        """Go to an address, without waiting for what it shows."""
        self.send("Page.navigate", url=url)

    def run(self, code: str) -> Any:
        """Return the value of an expression of the page."""
        found = self.send(
            "Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, (code, found["exceptionDetails"])
        return found["result"].get("value")

    def text(self, selector: str) -> str:
        """Return the text of an element as it is shown; empty for one that is hidden or not there."""
        return str(self.run(_shown(selector)))

    def wait(self, code: str, enough: Callable[[Any], object] = bool) -> Any:
        """Wait until an expression of the page is enough, and return its value.

        The page may load meanwhile: then it is asked again.
        """
        value = None

        def is_enough() -> object:
            nonlocal value
            with contextlib.suppress(NavigatedError):
                value = self.run(code)
                return enough(value)
            return False

        wait_until(is_enough, lambda: f"in vain for {code}; it is {value!r}")
        return value

    def wait_text(self, selector: str, words: str) -> str:
        """Wait until an element shows some words, and return all that it shows."""
        return str(self.wait(_shown(selector), lambda found: words in found))

    def click(self, selector: str, at: Sequence[float] = ()) -> None:
        """Click an element with the mouse: in its middle, or at a place within it."""
        quoted = json.dumps(selector)
        self.run(f"document.querySelector({quoted}).scrollIntoView({{block: 'center'}})")
        box = self.run(f"document.querySelector({quoted}).getBoundingClientRect().toJSON()")
        x, y = at or (box["width"] / 2, box["height"] / 2)
        place = {"x": box["x"] + x, "y": box["y"] + y, "button": "left", "clickCount": 1}
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, **place)

    def type(self, selector: str, words: str) -> None:
        """Write into a field in place of what it has."""
        self.click(selector)
        self.run(f"document.querySelector({json.dumps(selector)}).select()")
        self.send("Input.insertText", text=words)

    def press(self, *keys: str) -> None:
        """Press keys one after the other, wherever the focus is."""
        for key in keys:
            about = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key]}
            words = {"text": "\r"} if key == "Enter" else {"text": " "} if key == " " else {}
            self.send("Input.dispatchKeyEvent", type="keyDown", **about, **words)
            self.send("Input.dispatchKeyEvent", type="keyUp", **about)

    def look(self, *, dark: bool = False, width: int = 1440, height: int = 1000) -> None:
        """Set the scheme of colours and the size of the window."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)
