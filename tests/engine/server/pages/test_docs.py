"""The documentation in a real browser: every route and field, and examples that are accepted."""

from __future__ import annotations

from writing_engine import Scribe, app_of, serving

OPEN_ALL = "document.querySelectorAll('.route').forEach((one) => { one.open = true; })"
EMPTY = """[...document.querySelectorAll('.field')].filter((one) =>
  !one.querySelector('dd').innerText.trim()).map((one) => one.innerText)"""


def test_every_field_is_shown_with_its_meaning_and_fits(browser, tokenizer, fits):
    with serving(app_of(Scribe(tokenizer, "yes"), tokenizer)) as url:
        tab = browser.open(f"{url}/docs", 375)
        tab.until("document.querySelector('.route')")
        fits(tab, "docs-closed")
        tab.run(OPEN_ALL)
        number = tab.run("document.querySelectorAll('.route').length")
        tab.until(f"document.querySelectorAll('.inside').length === {number}")
        assert tab.run("document.querySelectorAll('.field').length") > 600
        assert tab.run(EMPTY) == []
        text = tab.text("main")
        assert "Least probability of a token, relative to the most likely one; default: " in text
        assert "undefined" not in text
        assert "``" not in text
        fits(tab, "docs-open")
        assert tab.problems == []


def test_a_search_leaves_the_routes_that_have_the_field(browser, tokenizer, fits):
    with serving(app_of(Scribe(tokenizer, "yes"), tokenizer)) as url:
        tab = browser.open(f"{url}/docs")
        tab.until("document.querySelector('.route')")
        tab.click("#find")
        tab.write("min_p")
        shown = "[...document.querySelectorAll('.route:not([hidden]) > summary > code')]"
        paths = tab.run(f"{shown}.map((one) => one.innerText)")
        assert paths == ["/v1/chat/completions", "/v1/completions"]
        tab.click(".route summary")
        tab.until("document.querySelector('.field.found')")
        fits(tab, "docs-found")
        tab.click("#find")
        tab.write(" no such thing")
        assert "Nothing here has “min_p no such thing”." in tab.text("#notice")
        assert tab.problems == []


def test_examples_are_accepted(server):
    document = server.get("/openapi.json").json()
    asked = set()
    for path, operations in document["paths"].items():
        body = operations.get("post", {}).get("requestBody")
        if body is None:
            continue
        asked.add(path)
        answer = server.post(path, json=body["content"]["application/json"]["example"])
        # This model makes no embeddings, and the server takes no adapters.
        told = {"/v1/embeddings", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
        assert (answer.status_code == 200) == (path not in told), (path, answer.text)
    assert len(asked) == 10
