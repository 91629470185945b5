"""The conversations that the browser keeps."""

import pytest
from page_engine import HANGS


def _titles(tab):
    return tab.run("[...document.querySelectorAll('#sidebar .title')].map((one) => one.innerText)")


def test_conversations_survive_a_reload_and_are_deleted_one_by_one_or_all(chat, fits):
    page = chat({"first": "one", "second": "two", "third": "three"})
    tab = page.tab
    for question in ("first", "second", "third"):
        tab.click("#fresh")
        page.ask(question)
    tab.go(f"{page.url}/docs")
    tab.go(page.url)
    tab.until("document.querySelectorAll('#sidebar .title').length === 3")
    assert _titles(tab) == ["third", "second", "first"]
    fits(tab, "chat-history")
    tab.look(1024)
    tab.click("#sidebar li:nth-child(2) .title")
    tab.until("document.querySelector('.turn.assistant')")
    assert page.answer() == "two"
    tab.reload()
    tab.until("document.querySelector('.turn.assistant')?.innerText.includes('two')")
    tab.click("#sidebar li:nth-child(2) [aria-label^=Delete]")
    tab.click("dialog[open] .main")
    tab.until("document.querySelectorAll('#sidebar .title').length === 2")
    assert tab.run("document.querySelector('#welcome') !== null")
    tab.click("#sidebar .foot button:last-child")
    tab.click("dialog[open] .main")
    tab.until("document.querySelectorAll('#sidebar .title').length === 0")
    assert tab.problems == []


@pytest.mark.deep
def test_a_conversation_that_is_deleted_while_its_answer_grows_does_not_come_back(chat):
    page = chat({"q": "part" + HANGS})
    page.ask("q", ends=False)
    page.tab.until("document.querySelectorAll('#sidebar .title').length === 1")
    page.tab.click("#sidebar [aria-label^=Delete]")
    page.tab.click("dialog[open] .main")
    page.tab.until("document.querySelector('#welcome') !== null")
    page.tab.run("new Promise((done) => setTimeout(done, 300))")
    assert _titles(page.tab) == []
    kept = 'import("/static/store.js").then((store) => store.titles()).then((all) => all.length)'
    assert page.tab.run(kept) == 0


@pytest.mark.deep
def test_two_tabs_do_not_destroy_each_others_conversations(chat, browser):
    page = chat({"begin": "begun", "left": "in the first", "right": "in the second" + HANGS})
    page.ask("begin")
    where = page.tab.run("location.href")
    other = browser.open(where, beside=page.tab)
    other.until("document.querySelector('.turn.assistant')")
    # The second tab's answer grows while the first tab goes on with the same conversation.
    second = type(page)(other, page.engine, page.url)
    second.ask("right", ends=False)
    other.until("document.querySelector('.busy .body')?.innerText.includes('second')")
    page.tab.until("document.body.innerText.includes('right')")  # and the first one sees it
    page.ask("left")
    other.press("Escape")
    second.until_ended()
    page.tab.until("document.querySelectorAll('#sidebar .title').length === 2")
    texts = page.tab.run(
        """import("/static/store.js").then((store) => store.all()).then((all) =>
        all.map((one) => one.nodes.map((node) => node.content).join("|")).join("\\n"))"""
    )
    assert "in the first" in texts
    assert "in the second" in texts


@pytest.mark.deep
def test_all_conversations_and_one_as_markdown_are_exported(chat):
    page = chat({"q": "an *answer*"})
    page.ask("q")
    page.tab.run(
        """(() => { globalThis.saved = []; URL.createObjectURL = (blob) => {
        blob.text().then((text) => saved.push(text)); return "#"; }; })()"""
    )
    page.tab.click("#save")
    page.tab.until("saved.length === 1")
    assert page.tab.run("saved[0]") == "# q\n\n## User\n\nq\n\n## tiny\n\nan *answer*\n"
    page.tab.click("#sidebar .foot button")
    page.tab.until("saved.length === 2")
    assert page.tab.run("JSON.parse(saved[1])[0].title") == "q"


@pytest.mark.deep
def test_without_a_history_the_page_says_so_and_works(chat, browser):
    page = chat({"q": "a"})
    script = "Object.defineProperty(window, 'indexedDB', { value: { open() { const r = {};"
    script += "setTimeout(() => r.onerror()); return r; } } })"
    page.tab = browser.open("about:blank")
    page.tab.call("Page.addScriptToEvaluateOnNewDocument", source=script)
    page.tab.go(page.url)
    page.tab.until("document.getElementById('sidebar').innerText.includes('keeps no history')")
    page.ask("q")
    assert page.answer() == "a"
