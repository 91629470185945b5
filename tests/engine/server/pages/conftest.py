"""A browser for the tests of the pages, and servers without a model."""

from __future__ import annotations

from contextlib import ExitStack

import browser as chromium
import pytest
from page_engine import Speaker
from writing_engine import app_of, serving, tokenizer_with_tools

from kiln.engine.text.tokenizer import Tokenizer

WIDTHS = (375, 1024, 1440)
# A tab behind another one draws no frames; there the page has heard after a while at most.
_NEXT_FRAME = """new Promise((done) => {
  requestAnimationFrame(() => requestAnimationFrame(done));
  setTimeout(done, 1000);
})"""


@pytest.fixture(scope="session")
def browser():
    """One browser for all tests; each tab has storage of its own."""
    if chromium.find() is None:
        pytest.skip("needs Chromium")
    with chromium.Browser() as opened:
        yield opened


@pytest.fixture
def fits(request):
    """Assert that a page fits at every width: ``fits(tab, "name of its state")``.

    With ``--screenshots FOLDER`` it also saves a picture at each width, in light and dark.
    """
    folder = request.config.option.screenshots

    def check(tab, state):
        for theme in ("light", "dark") if folder else ("light",):
            for width in WIDTHS:
                tab.look(width, theme)
                tab.run(_NEXT_FRAME)  # the page hears of its new size with the next frame
                assert tab.overflowing() == [], f"{state} at {width} px"
                if folder:
                    tab.screenshot(folder / f"{state}-{width}-{theme}.png")

    return check


class Chat:
    """A chat page in a tab, and the engine behind it."""

    def __init__(self, tab, engine, url):
        self.tab, self.engine, self.url = tab, engine, url

    def ask(self, text, ends=True):
        """Send a message; ``ends``: wait until its answer has."""
        answers = self.tab.run("document.querySelectorAll('.turn').length")
        self.tab.until(
            "!document.getElementById('input').disabled && document.querySelector('.dot.ready')"
        )
        self.tab.click("#input")
        self.tab.write(text)
        self.tab.until("!document.getElementById('send').disabled")
        self.tab.press("Enter")
        self.tab.until(f"document.querySelectorAll('.turn').length > {answers}")
        if ends:
            self.until_ended()

    def until_ended(self):
        """Wait until no answer grows."""
        self.tab.until(
            "document.querySelector('.turn.assistant') && !document.querySelector('.turn.busy')"
        )

    def answer(self):
        """The text of the last answer's body."""
        return self.tab.run(
            "[...document.querySelectorAll('.turn.assistant .body')].at(-1).innerText"
        )

    def set(self, **values):
        """Fill fields of the settings."""
        self.tab.click("#open-settings")
        for name, value in values.items():
            self.tab.run(
                f"""(() => {{ const field = document.querySelector('#settings [name={name}]');
                field.value = {value!r};
                field.dispatchEvent(new Event("input", {{ bubbles: true }})); }})()"""
            )
        self.tab.click("#settings menu .main")


@pytest.fixture(autouse=True)
def _close_tabs(request):
    """Close the tabs that a test has opened: each would go on asking for its server."""
    opened = request.getfixturevalue("browser").tabs if "browser" in request.fixturenames else {}
    before = set(opened.values())
    yield
    for one in set(opened.values()) - before:
        one.close()


@pytest.fixture(scope="session")
def tab(browser):
    """One tab for many tests: each server has a port, and so storage, of its own."""
    return browser.open("about:blank")


@pytest.fixture
def chat(tab, model_folder):
    """Open the chat of an engine that answers so: ``chat({question: answer}) -> Chat``."""
    with ExitStack() as stack:

        def start(answers, width=1024, unready="", template=True, **settings):
            tokenizer = tokenizer_with_tools(model_folder)
            if not template:
                tokenizer = Tokenizer(tokenizer.backend, eos_ids=tokenizer.eos_token_ids)
            engine = Speaker(tokenizer, answers)
            engine.unready = unready
            url = stack.enter_context(serving(app_of(engine, tokenizer, **settings)))
            tab.look(width)
            tab.go(url)
            tab.problems.clear()
            return Chat(tab, engine, url)

        yield start
