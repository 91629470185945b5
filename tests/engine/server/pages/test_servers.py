"""The chat page before servers of several kinds."""

from types import SimpleNamespace

import pytest
from scripted_engine import Writer
from writing_engine import app_of, serving

from kiln.engine.process.wire import ModelInfo
from kiln.engine.requests.pooling import Embedder


def test_an_embedding_server_has_nothing_to_chat_with(browser, tokenizer, fits):
    engine = Writer(tokenizer)
    engine.model_info = ModelInfo(4096, 1000, "float32", "cpu", embedder=Embedder(16))
    with serving(app_of(engine, tokenizer)) as url:
        tab = browser.open(url)
        tab.until("document.getElementById('state').innerText.includes('embeddings')")
        tab.click("#input")
        tab.write("x")
        assert tab.run("document.getElementById('send').disabled")
        fits(tab, "chat-embeddings")
        assert tab.problems == []


def test_the_picker_names_adapters_and_the_answer_comes_from_the_picked_one(chat):
    page = chat({"x": "y"})
    page.engine.adapters.adapters["poems"] = SimpleNamespace()
    page.tab.until("document.querySelector('#model option')")
    page.tab.run("document.getElementById('model').focus()")
    page.tab.until("document.querySelector('#model optgroup option')?.value === 'poems'")
    page.tab.run(
        """(() => { const model = document.getElementById("model");
        model.value = "poems"; model.onchange(); })()"""
    )
    page.ask("x")
    assert page.engine.requests[0].adapter == "poems"
    assert "poems" in page.tab.text(".note")


@pytest.mark.parametrize("key", [None, "s3cret"])
def test_the_page_works_behind_a_prefix(browser, tokenizer, key):
    app = app_of(Writer(tokenizer, "yes"), tokenizer, api_key=key)

    async def proxied(scope, receive, send):
        """As behind a proxy that takes the prefix off."""
        if scope["type"] == "http":
            assert scope["path"].startswith("/kiln/"), scope["path"]
            scope = {**scope, "path": scope["path"].removeprefix("/kiln"), "raw_path": b""}
        await app(scope, receive, send)

    with serving(proxied) as url:
        tab = browser.open(f"{url}/kiln/")
        if key:
            tab.click("#key-dialog input")
            tab.write(key)
            tab.press("Enter")
        tab.until("document.getElementById('model').value === 'tiny'")
        assert tab.run("document.querySelector('#top nav a:last-child').href").endswith(
            "/kiln/metrics"
        )
        assert tab.problems == []
