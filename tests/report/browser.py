"""A real browser, driven over the DevTools protocol through two pipes: no port, no package."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-extensions"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--force-color-profile=srgb", "about:blank"),
)
_PATIENCE = 300.0


def chromium() -> str | None:
    """A browser on this machine: FEDVEIL_CHROMIUM, or what is on the path."""
    named = os.environ.get("FEDVEIL_CHROMIUM")
    return named or next((found for name in _NAMES if (found := shutil.which(name))), None)


class Browser:
    """One browser with one page; collects what the page complains about and what it asks the network for."""

    def __init__(self, say: int, hear: int) -> None:
        self._say, self._hear = say, hear
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        self.requests: list[str] = []

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask, and wait for the answer; events that come before it are kept."""
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._say, data) :]
        while True:
            heard = self._next()
            if heard.get("id") == number:
                assert "error" not in heard, f"{method}: {heard['error']}"
                result: dict[str, Any] = heard["result"]
                return result
            self._note(heard)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._hear], [], [], _PATIENCE)
            part = os.read(self._hear, 1 << 20) if ready else b""
            if not part:
                raise AssertionError("the browser ended, or does not answer")
            self._rest += part
        one, _, self._rest = self._rest.partition(b"\0")
        heard: dict[str, Any] = json.loads(one)
        return heard

    def _note(self, event: dict[str, Any]) -> None:
        about = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(about["exceptionDetails"])[:600])
            case "Runtime.consoleAPICalled" if about["type"] in ("error", "warning", "assert"):
                self.complaints.append(json.dumps(about["args"])[:600])
            case "Log.entryAdded":
                self.complaints.append(json.dumps(about["entry"])[:600])
            case "Network.requestWillBeSent":
                self.requests.append(about["request"]["url"])

    def attach(self) -> None:
        """Take the browser's page and listen to it."""
        targets = self.send("Target.getTargets")["targetInfos"]
        page = next(one["targetId"] for one in targets if one["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def show(self, page: Path, *, width: int = 1400, height: int = 900, dark: bool = False) -> None:
        """Open a file at a width, in a theme, and wait until its pictures stand."""
        self.complaints.clear()
        self.requests.clear()
        self.media("screen", dark=dark)
        self.resize(width, height)
        self.send("Page.navigate", url=page.resolve().as_uri())
        self.wait("document.documentElement?.dataset.ready === 'yes' && document.readyState === 'complete'")

    def resize(self, width: int, height: int = 900) -> None:
        """Another window."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def media(self, kind: str, *, dark: bool = False) -> None:
        """Screen or print, and the theme the system prefers."""
        wish = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", media=kind, features=[wish])

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until a JavaScript condition holds."""
        end = time.monotonic() + _PATIENCE
        while not self.run(condition):
            assert time.monotonic() < end, f"never came true: {condition}"
            time.sleep(0.05)

    def middle(self, selector: str) -> tuple[float, float]:
        """Where the middle of an element is, after scrolling to it."""
        x, y = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        return x, y

    def click(self, selector: str) -> None:
        """A real click, by mouse, in the middle of an element."""
        x, y = self.middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str, code: int) -> None:
        """A key, as a keyboard sends it."""
        for kind in ("rawKeyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def picture(self, file: Path, *, whole: bool = True) -> None:
        """A screenshot, of the whole page or of the window."""
        made = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(made["data"]))

    def printed(self) -> bytes:
        """The page as a PDF."""
        return base64.b64decode(self.send("Page.printToPDF", printBackground=True, preferCSSPageSize=True)["data"])


@contextmanager
def browser(program: str) -> Iterator[Browser]:
    """A browser of its own, with an empty profile."""
    to_it, say = os.pipe()
    hear, from_it = os.pipe()

    def places() -> None:
        # The browser reads commands from descriptor 3 and answers on 4; copies first, as the numbers may be taken.
        reading, writing = os.dup(to_it), os.dup(from_it)
        while reading in (3, 4) or writing in (3, 4):
            reading, writing = os.dup(reading), os.dup(writing)
        os.dup2(reading, 3)
        os.dup2(writing, 4)

    with TemporaryDirectory(prefix="fedveil-chromium-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [program, f"--user-data-dir={profile}", *_FLAGS],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=places,
        )
        os.close(to_it)
        os.close(from_it)
        try:
            made = Browser(say, hear)
            made.attach()
            yield made
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(say)
            os.close(hear)
