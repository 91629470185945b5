"""The chat page before servers of several kinds."""

from types import SimpleNamespace

import pytest
from depth import at_depth
from scripted_engine import Writer
from writing_engine import app_of, serving

from kiln.engine.process.wire import ModelInfo
from kiln.engine.requests.pooling import Embedder


def test_an_embedding_server_has_nothing_to_chat_with(tab, tokenizer, fits):
    engine = Writer(tokenizer)
    engine.model_info = ModelInfo(4096, 1000, "float32", "cpu", embedder=Embedder(16))
    with serving(app_of(engine, tokenizer)) as url:
        tab.go(url)
        tab.until("document.getElementById('state').innerText.includes('embeddings')")
        assert not tab.run("document.getElementById('form').checkVisibility()")
        fits(tab, "chat-embeddings")


@pytest.mark.deep
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


def test_a_model_without_a_chat_template_continues_the_text(chat):
    page = chat({"Once upon": " a time."}, template=False)
    page.set(logprobs="3")
    page.ask("Once upon")
    assert page.engine.prompts == ["Once upon"]
    assert page.tab.run("document.querySelectorAll('.tokens .token').length") > 3
    page.tab.click(".actions .text-button")
    assert page.answer() == "a time."


@pytest.mark.parametrize("key", at_depth(["s3cret"], [None, "s3cret"]))
def test_the_page_works_behind_a_prefix(tab, tokenizer, key):
    app = app_of(Writer(tokenizer, "yes"), tokenizer, api_key=key)

    async def proxied(scope, receive, send):
        """As behind a proxy that takes the prefix off."""
        if scope["type"] == "http":
            assert scope["path"].startswith("/kiln/"), scope["path"]
            scope = {**scope, "path": scope["path"].removeprefix("/kiln"), "raw_path": b""}
        await app(scope, receive, send)

    with serving(proxied) as url:
        tab.go(f"{url}/kiln/")
        tab.problems.clear()
        if key:
            tab.click("#key-dialog input")
            tab.write(key)
            tab.press("Enter")
        tab.until("document.getElementById('model').value === 'tiny'")
        assert tab.run("document.querySelector('#top nav a:last-child').href").endswith(
            "/kiln/metrics"
        )
        assert tab.problems == []
