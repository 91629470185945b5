#!/usr/bin/env python3
"""Take pictures of the dashboard while the demo model serves a load.

    python tools/dashboard_screenshot.py FOLDER [--seconds 60] [--widths 375 1440] [--scale 2]
    python tools/dashboard_screenshot.py FOLDER --url http://127.0.0.1:8000

Without --url it starts a server of the demo model with both of its LoRA adapters; without a GPU
its CUDA graphs are emulated. It needs Chromium. Files: dashboard-WIDTH-THEME.png.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools" / "import_root"), str(ROOT / "tests" / "helpers")]

import browser as chromium  # noqa: E402 (a helper of the tests)
import httpx  # noqa: E402

CLIENTS = 6
ZOOM_OUT = 2  # times, so that the steps are of several kinds
INTRODUCTION = "You are a careful assistant who answers in one sentence. " * 3


def main() -> None:
    """Serve, load, wait, and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--url", help="of a server that runs; default: one of the demo model")
    parser.add_argument("--seconds", type=float, default=60.0, help="of load before the pictures")
    parser.add_argument("--widths", type=int, nargs="+", default=[1440])
    parser.add_argument("--themes", nargs="+", default=["light"], choices=["light", "dark"])
    parser.add_argument("--scale", type=float, default=2.0, help="pixels of a CSS pixel")
    parser.add_argument("--height", type=int, help="of a picture in CSS pixels; default: the page")
    args = parser.parse_args()
    with _server(args.url) as url, _load(url), chromium.Browser() as browser:
        tab = browser.open(f"{url}/dashboard", max(args.widths))
        time.sleep(args.seconds)
        for _ in range(ZOOM_OUT):
            tab.run("document.querySelector('[aria-label=\"Zoom out\"]').click()")
        for theme in args.themes:
            for width in args.widths:
                tab.look(width, theme, args.height or 900)
                time.sleep(2)
                path = args.folder / f"dashboard-{width}-{theme}.png"
                tab.screenshot(path, scale=args.scale, whole=args.height is None)
                print(path)
        sys.exit("\n".join(tab.problems) or 0)


@contextmanager
def _server(url: str | None) -> Iterator[str]:
    """Yield the URL of a server."""
    if url is not None:
        yield url.rstrip("/")
        return
    from kiln.engine.cli.local_server import local_server

    demo = ROOT / "engine" / "demo"
    adapters = [f"{path.name}={path}" for path in sorted((demo / "adapters").iterdir())]
    os.environ.setdefault("KILN_CPU_GRAPHS", "emulate")
    flags = ["--lora-modules", *adapters, "--max-num-seqs", "8", "--num-kv-blocks", "256"]
    with local_server([str(demo), *flags], 300) as (own, _):
        yield own


@contextmanager
def _load(url: str) -> Iterator[None]:
    """Send requests of several kinds until the block ends."""
    stop = threading.Event()
    models = [one["id"] for one in httpx.get(f"{url}/v1/models").json()["data"]]
    clients = [
        threading.Thread(target=_ask, args=(url, models, number, stop)) for number in range(CLIENTS)
    ]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        stop.set()
        for client in clients:
            client.join()


def _ask(url: str, models: list[str], number: int, stop: threading.Event) -> None:
    """Ask one question after the other, with pauses."""
    chance = random.Random(number)
    with httpx.Client(base_url=url, timeout=120) as client:
        while not stop.is_set():
            start = INTRODUCTION if chance.random() < 0.7 else ""
            question = f"{start}What is {chance.randrange(100)} + {chance.randrange(100)}?"
            body = {
                "model": models[0] if chance.random() < 0.8 else chance.choice(models),
                "messages": [{"role": "user", "content": question}],
                "max_tokens": chance.choice([16, 48, 120]),
                "ignore_eos": True,
                "stream": True,
            }
            with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                for _ in answer.iter_lines():
                    pass
            busy = time.monotonic() % 40 < 28  # a load that rises and falls
            stop.wait(chance.expovariate(4 if busy else 0.7))


if __name__ == "__main__":
    main()
