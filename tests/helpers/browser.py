"""A real browser for the tests of the pages: Chromium, driven over a pipe by its DevTools protocol.

``find()`` says whether there is one. A ``Tab`` has cookies and storage of its own, unless it is
``beside`` another one, and records what a user would see as errors in the console.
"""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import queue
import shutil
import signal
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

# What a script's call says if the page that it ran in has gone, because another is loaded.
GONE = ("Inspected target navigated or closed", "Cannot find context", "context was destroyed")
SECONDS = 30.0  # for an answer of the browser, or a condition
_FLAGS = (
    *("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu"),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--force-color-profile=srgb", "--mute-audio"),
)
_KEYS = {
    "Enter": 13,
    "Escape": 27,
    "Tab": 9,
    "ArrowDown": 40,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowLeft": 37,
    "Backspace": 8,
}
# Elements that stick out of the window, and of no box that scrolls or cuts them.
_OVERFLOW = """(() => {
  const width = document.documentElement.clientWidth;
  const kept = (node) => node && node !== document.body && (
    /auto|scroll|hidden|clip/.test(getComputedStyle(node).overflowX) || kept(node.parentElement));
  const out = [...document.querySelectorAll("body *")].filter((node) => {
    const box = node.getBoundingClientRect();
    return box.width && box.height && (box.right > width + 1 || box.left < -1) &&
      !kept(node.parentElement) && getComputedStyle(node).visibility !== "hidden";
  }).map((node) => node.outerHTML.slice(0, 120));
  return document.documentElement.scrollWidth > width ? ["the page scrolls sideways", ...out] : out;
})()"""


def find() -> str | None:
    """Return the path of Chromium or Chrome; None if there is none."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next(filter(None, map(shutil.which, names)), None)


class Browser:
    """A browser process. ``with Browser() as browser: tab = browser.open(url)``."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(
            prefix="kiln-browser-", ignore_cleanup_errors=True
        )
        (its_in, self._out), (self._into, its_out) = os.pipe(), os.pipe()
        # The protocol's pipes are the descriptors 3 and 4 of the process. Higher copies of ours
        # cannot be overwritten while they are moved there.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (its_in, its_out)]
        moves = [(os.POSIX_SPAWN_DUP2, end, place) for place, end in enumerate(ends, 3)]
        quiet = (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)
        program = find()
        assert program is not None, "there is no Chromium"
        command = [program, *_FLAGS, f"--user-data-dir={self._folder.name}"]
        self._process = os.posix_spawn(program, command, os.environ, file_actions=[quiet, *moves])
        for end in (its_in, its_out, *ends):
            os.close(end)
        self._numbers = itertools.count(1)
        self._answers: dict[int, queue.Queue[Any]] = defaultdict(lambda: queue.Queue(1))
        self.tabs: dict[str, Tab] = {}  # that are open, by session
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._out)
        self._reader.join(SECONDS)
        os.close(self._into)
        self._folder.cleanup()

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Run a method of the protocol, and return its result. Raises RuntimeError."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        answers = self._answers[number]
        os.write(
            self._out,
            json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0",
        )
        answer = answers.get(timeout=SECONDS)
        del self._answers[number]
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def open(
        self, url: str, width: int = 1024, theme: str = "light", beside: Tab | None = None
    ) -> Tab:
        """Open a page in a tab of its own, or beside another one and with its storage."""
        context = (
            beside.context
            if beside
            else self.call("Target.createBrowserContext")["browserContextId"]
        )
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)[
            "targetId"
        ]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = self.tabs[session] = Tab(self, session, context, target)
        for domain in ("Page", "Runtime", "Log"):
            tab.call(f"{domain}.enable")
        tab.look(width, theme)
        tab.go(url)
        return tab

    def _read(self) -> None:
        rest = b""
        while part := os.read(self._into, 1 << 16):
            *messages, rest = (rest + part).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    self._answers[message["id"]].put(message)
                elif tab := self.tabs.get(message.get("sessionId", "")):
                    tab.note(message["method"], message["params"])


class Tab:
    """A page. ``problems``: errors in its console, exceptions, and what its policy refused."""

    def __init__(self, browser: Browser, session: str, context: str, target: str) -> None:
        self.problems: list[str] = []
        self.context = context
        self._browser, self._session, self._target = browser, session, target

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Run a method of the protocol on this tab."""
        return self._browser.call(method, self._session, **params)

    def note(self, method: str, params: dict[str, Any]) -> None:
        """Record an event if it is a problem."""
        if method == "Runtime.exceptionThrown":
            thrown = params["exceptionDetails"]
            self.problems.append(thrown.get("exception", {}).get("description", thrown["text"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.problems.append(" ".join(str(one.get("value", one)) for one in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(
                f"{params['entry']['text']} {params['entry'].get('url', '')}".strip()
            )

    def look(self, width: int, theme: str = "light", height: int = 800) -> None:
        """Set the size of the window in CSS pixels, and the system's colour scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": theme}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.call("Emulation.setEmulatedMedia", features=[scheme, still])

    def go(self, url: str) -> None:
        """Load a page, and wait until its scripts have run."""
        self.call("Page.bringToFront")  # a hidden page paints nothing
        self.call("Page.navigate", url=url)
        self.until(
            f"document.readyState === 'complete' && location.href.startsWith({json.dumps(url)})"
        )

    def reload(self) -> None:
        """Load the page again, and wait until its scripts have run."""
        self.run("window.isOld = true")
        self.call("Page.reload")
        self.until("document.readyState === 'complete' && !window.isOld")

    def run(self, script: str) -> Any:
        """Return the value of an expression; a promise is awaited. Raises RuntimeError."""
        done = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in done:
            thrown = done["exceptionDetails"]
            raise RuntimeError(thrown.get("exception", {}).get("description", thrown["text"]))
        return done["result"].get("value")

    def until(self, condition: str) -> Any:
        """Wait until an expression is true, and return its value. Raises TimeoutError.

        While it waits, another page may replace this one.
        """
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            try:
                if value := self.run(f"((it) => it instanceof Node || it)({condition})"):
                    return value
            except RuntimeError as gone:
                if not any(sign in str(gone) for sign in GONE):
                    raise
            time.sleep(0.02)
        raise TimeoutError(
            f"never true: {condition}; the page says: {self.run('document.body.innerText')!r}"
        )

    def text(self, selector: str = "body") -> str:
        """Return the visible text of the first element that matches."""
        return self.run(f"document.querySelector({json.dumps(selector)}).innerText")

    def click(self, selector: str) -> None:
        """Click on the middle of the first visible element that matches, once there is one."""
        point = self.until(
            f"(() => {{ const node = [...document.querySelectorAll({json.dumps(selector)})]"
            ".find((one) => one.checkVisibility()); if (!node) return null;"
            "node.scrollIntoView({ block: 'nearest' }); const box = node.getBoundingClientRect();"
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind, buttons in (("mouseMoved", 0), ("mousePressed", 1), ("mouseReleased", 1)):
            button = "left" if buttons else "none"
            self.call(
                "Input.dispatchMouseEvent",
                type=kind,
                x=point[0],
                y=point[1],
                button=button,
                clickCount=buttons,
            )

    def write(self, text: str) -> None:
        """Insert text where the focus is."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, shift: bool = False) -> None:
        """Press a key where the focus is."""
        text = {"text": "\r"} if key == "Enter" else {}
        how = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key], "modifiers": 8 * shift}
        self.call("Input.dispatchKeyEvent", type="keyDown", **how, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **how)

    def overflowing(self) -> list[str]:
        """Return what sticks out of the window; empty for a page that fits."""
        return self.run(_OVERFLOW)

    def screenshot(self, path: Path, scale: float = 1.0, whole: bool = False) -> None:
        """Write what the window shows, or the whole page, as a PNG; ``scale``: its density."""
        size = self.call("Page.getLayoutMetrics")
        shown = size["cssContentSize" if whole else "cssVisualViewport"]
        width = shown.get("width", shown.get("clientWidth"))
        height = shown.get("height", shown.get("clientHeight"))
        if scale != 1 or whole:
            self.call(
                "Emulation.setDeviceMetricsOverride",
                width=round(width),
                height=round(height),
                deviceScaleFactor=scale,
                mobile=False,
            )
            self.until(f"devicePixelRatio === {scale} && innerHeight === {round(height)}")
            time.sleep(1.5)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        """Close the tab."""
        del self._browser.tabs[self._session]
        self._browser.call("Target.closeTarget", targetId=self._target)
