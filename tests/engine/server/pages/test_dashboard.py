"""The dashboard in a real browser: what it shows of a server in each of its states."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from scripted_engine import Writer
from writing_engine import app_of, serving

from kiln.engine.errors import EngineDeadError
from kiln.engine.process.wire import ModelInfo
from kiln.engine.requests.adapter_job import AdapterInfo
from kiln.engine.requests.step_log import StepRecord

KEY = "s3cret-ключ"  # of the server ``opened``
BODY = {"prompt": [[5] * 7, [6, 7], [8] * 30], "max_tokens": 40, "ignore_eos": True}
INK = """(() => [...document.querySelectorAll("canvas")].filter((one) => one.checkVisibility())
  .map((one) => new Set(new Uint32Array(one.getContext("2d")
    .getImageData(0, 0, one.width, one.height).data.buffer)).size))()"""
HOVER = """(() => { const strip = document.querySelector("#strip canvas");
  strip.scrollIntoView({ block: "center" });
  const box = strip.getBoundingClientRect();
  return [box.x + box.width * 0.9, box.y + 40]; })()"""
KERNELS = {
    "norm": "jit: KILN_NORM=auto, and it is faster than Triton at every size of this model",
    "attention_decode": "torch: there is no kernel for this dtype, head_dim and block_size",
}


class Shown(Writer):
    """An engine whose numbers a test sets."""

    def __init__(self, tokenizer, **counts):
        super().__init__(tokenizer)
        self.counts = counts
        self.model_info = ModelInfo(4096, 1000, "bfloat16", "cuda:0", KERNELS, "8192 tokens")
        self.steps.begin_engine()

    def stats(self):
        idle = {"kv_blocks_used": 30, "kv_blocks_cached": 50, "kv_blocks_total": 100, "running": 2}
        return {**idle, **self.counts}


def record(number, begun, kind="decode", graph="4", seconds=0.01, drafts=0):
    reason = "" if graph else "too many rows"
    return StepRecord(number, begun, seconds, 0.008, kind, 4, 4 + drafts, drafts, 5, graph, reason)


def open_dashboard(browser, engine, tokenizer, use, **window):
    with serving(app_of(engine, tokenizer)) as url:
        use(browser.open(f"{url}/dashboard", **window))


def test_a_server_under_load(browser, opened, fits):
    tab = browser.open(f"{opened.base_url}/dashboard")
    tab.click("#key-dialog input[type=password]")
    tab.write(KEY)
    tab.click("#key-dialog .main")
    tab.until("document.querySelectorAll('#kernels tbody tr').length > 3")
    assert opened.post("/v1/completions", json=BODY).status_code == 200
    tab.until("document.querySelector('.keys').innerText.includes('no graph')")
    for shown in ("2 rows", "too many rows"):
        tab.until(f"document.querySelector('#graphs').innerText.includes('{shown}')")
    assert "first" in tab.text("h1")
    assert "restarts 0" in tab.text("#facts")
    tab.until(f"{INK}.every((colours) => colours > 3)")
    x, y = tab.run(HOVER)
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    tab.until("document.querySelector('.about').innerText.includes('From launch to tokens')")
    fits(tab, "dashboard-load")
    assert tab.problems == []


def test_a_step_can_be_looked_at_and_the_strip_paused_and_zoomed(browser, tokenizer):
    engine = Shown(tokenizer, graphs=2, graph_replays={"4": 30}, num_steps=31)
    now = time.monotonic()
    steps = [record(one, now + one * 0.01) for one in range(1, 60)]
    steps.append(record(60, now + 0.9, "prefill", "", 0.1))
    engine.steps.add(steps)

    def use(tab):
        tab.until("document.querySelector('.keys')?.innerText.includes('no graph')")
        tab.run("document.querySelector('#strip canvas').focus()")
        tab.press("ArrowRight")
        about = tab.until("document.querySelector('.about').innerText")
        assert "60, prefill" in about
        assert "none: too many rows" in about
        assert "300 ms after the step ahead ended; meanwhile none was in flight" in about
        tab.press("ArrowLeft")
        assert "59, decode" in tab.text(".about")
        assert tab.run("document.querySelector('#strip-tools .button').ariaPressed") == "false"
        before = tab.text("#strip .hint")
        tab.click("#strip-tools [aria-label='Zoom out']")
        assert tab.text("#strip .hint") != before
        tab.run("document.querySelector('#strip-tools select').value = 'kind'")
        tab.run("document.querySelector('#strip-tools select').onchange()")
        assert "prefill" in tab.text(".keys")
        tab.click("#strip-tools .button")
        engine.steps.begin_engine()
        engine.steps.add([record(1, now + 1.5)])
        tab.until("document.querySelector('.about') && innerWidth")
        tab.press("Escape")
        assert tab.problems == []

    open_dashboard(browser, engine, tokenizer, use)


def test_eight_adapters_and_drafts(browser, tokenizer, fits):
    names = [f"adapter-with-a-long-name-{one}" for one in range(8)]
    engine = Shown(tokenizer, spec_decode_num_draft_tokens=0, spec_decode_num_accepted_tokens=0)
    engine.adapters.adapters = {
        name: AdapterInfo(name, f"/adapters/{name}", False, 16, 1 << 20) for name in names
    }
    for count in ("running", "waiting", "on_device", "placements", "tokens"):
        engine.counts[f"adapter_{count}"] = dict.fromkeys(names, 1)

    def use(tab):
        tab.until("document.querySelectorAll('#adapters tbody tr').length === 8")
        engine.counts.update(spec_decode_num_draft_tokens=40, spec_decode_num_accepted_tokens=30)
        tab.until("document.querySelector('#charts').innerText.includes('75 %')")
        fits(tab, "dashboard-adapters")
        assert "bfloat16" in tab.text("#facts")
        assert "8192 tokens" in tab.text("#facts")
        assert KERNELS["norm"].partition(": ")[2] in tab.text("#kernels")
        assert tab.problems == []

    open_dashboard(browser, engine, tokenizer, use)


def test_a_server_that_loads_restarts_and_goes_away(browser, tokenizer, fits):
    """A load is no error: the page waits, and goes on by itself."""
    engine = Shown(tokenizer)
    info, engine.model_info = engine.model_info, SimpleNamespace()
    said = "document.querySelector('#notice').innerText"

    class Loading(Shown):
        @property
        def model_info(self):
            if self.is_ready:
                return info
            raise EngineDeadError("the engine is still loading the model")

        @model_info.setter
        def model_info(self, ignored):
            pass

    engine = Loading(tokenizer)
    engine.is_ready = False
    with serving(app_of(engine, tokenizer)) as url:
        tab = browser.open(f"{url}/dashboard", 375)
        tab.until(f"{said}.includes('still loading')")
        fits(tab, "dashboard-loading")
        engine.is_ready = True
        tab.until("document.querySelector('#notice').hidden")
        tab.until("document.querySelector('#strip .hint').innerText.includes('No steps yet')")
        fits(tab, "dashboard-idle")
        engine.is_alive = False
        tab.until(f"{said}.includes('The engine has stopped')")
    tab.until(f"{said}.includes('does not answer')")
    fits(tab, "dashboard-down")
    assert all("503" in one or "ERR_" in one for one in tab.problems), tab.problems


def test_without_the_key_the_page_asks_once_and_offers_to_enter_it(browser, opened, fits):
    tab = browser.open(f"{opened.base_url}/dashboard", 375)
    tab.until("document.querySelector('#key-dialog')")
    tab.press("Escape")
    tab.until("document.querySelector('#notice button')")
    fits(tab, "dashboard-no-key")
    tab.click("#notice button")
    tab.click("#key-dialog input[type=password]")
    tab.write(KEY)
    tab.click("#key-dialog .main")
    tab.until("document.querySelectorAll('#kernels tbody tr').length > 3")
    assert tab.problems == []


CASES = [
    (0.5, [1, 2], [0, 0, 0], None),
    (0.5, [1, 2], [10, 10, 10], 0.5),
    (0.5, [1, 2, 4], [0, 10, 20, 20], 2),
    (0.75, [1, 2, 4], [0, 10, 20, 20], 3),
    (0.99, [1, 2], [0, 0, 5], 2),
]


def test_quantiles_and_rates_of_counters(browser, opened):
    tab = browser.open(f"{opened.base_url}/version")

    def run(script):
        return tab.run(f"import('/static/dashboard/history.js').then((m) => {script})")

    for share, bounds, counts, wanted in CASES:
        found = run(f"m.quantile({share}, {bounds}, {counts})")
        assert found == (wanted if wanted is None else pytest.approx(wanted))
    samples = [(0, 0), (1, 10), (2, 20), (3, 30), (4, 60), (5, 5), (6, 15), (7, 25), (8, 35)]
    rates = run(
        "{ const history = new m.History();"
        f"return {[list(one) for one in samples]}.map(([time, generation_tokens]) => history.add("
        "{ time, values: { generation_tokens }, histograms: {} }).generated); }"
    )
    # The counter of a server that has started again begins at 0: nothing is known until it grows.
    assert rates[:5] == [None, 10, 10, 10, pytest.approx(50 / 3)]
    assert rates[5:] == [None, None, None, 10]
