"""What the pages share, in a real browser: the key, the header, and the policy."""

import pytest
from writing_engine import Scribe, app_of, serving

from kiln.engine.server.pages import routes

KEY = "s3cret-ключ"
PAGES = sorted(path for path in routes.FILES if not path.startswith("/static/"))
IS_READY = "document.querySelector('#top .dot.ready') !== null"


@pytest.fixture(scope="module")
def guarded(tokenizer):
    with serving(app_of(Scribe(tokenizer, "yes"), tokenizer, api_key=KEY)) as url:
        yield url


@pytest.fixture(scope="module")
def unguarded(tokenizer):
    with serving(app_of(Scribe(tokenizer, "yes"), tokenizer)) as url:
        yield url


def _enter(tab, key, remember=False):
    tab.click("#key-dialog input[type=password]")
    tab.write(key)
    if remember:
        tab.click("#key-dialog input[type=checkbox]")
    tab.click("#key-dialog .main")


def _without_name(tab):
    """Return what a screen reader finds on a page and cannot name."""
    roles = {"button", "textbox", "combobox", "link", "checkbox", "spinbutton", "dialog", "image"}
    nodes = tab.call("Accessibility.getFullAXTree")["nodes"]
    found = [one for one in nodes if not one["ignored"] and one["role"]["value"] in roles]
    assert len(found) > 5
    return [one for one in found if not one["name"]["value"]]


@pytest.mark.parametrize("path", PAGES)
def test_every_page_has_reachable_links_and_no_error(browser, unguarded, fits, path):
    tab = browser.open(unguarded + path, 375)
    tab.until(IS_READY)
    hrefs = tab.run("[...document.querySelectorAll('#top nav a')].map((one) => one.href)")
    assert hrefs == [f"{unguarded}/{name}" for name in ("", "dashboard", "docs", "metrics")]
    fits(tab, f"page{path.replace('/', '-')}")
    assert _without_name(tab) == []
    assert tab.problems == []


def test_a_wait_goes_on_when_another_page_replaces_the_one_it_began_on(browser, unguarded):
    tab = browser.open(unguarded, 375)
    tab.run("window.isOld = true")
    tab.run("void setTimeout(() => location.reload(), 100)")
    assert tab.until("window.isOld ? new Promise(() => {}) : 'new'") == "new"
    tab.run("window.isOld = true")
    tab.reload()
    assert tab.run("window.isOld") is None


@pytest.mark.parametrize("path", PAGES)
def test_every_page_asks_for_the_key_itself(browser, guarded, fits, path):
    tab = browser.open(guarded + path, 375)
    tab.until("document.querySelector('#key-dialog[open]')")
    fits(tab, f"key{path.replace('/', '-')}")
    _enter(tab, KEY)
    tab.until("!document.querySelector('#key-dialog')")
    tab.until(IS_READY)
    assert tab.problems == []
    assert tab.run("[sessionStorage.length, localStorage.getItem('kiln.key')]") == [1, None]


@pytest.mark.deep
def test_a_wrong_key_is_asked_for_again_and_a_remembered_one_never(browser, guarded):
    tab = browser.open(f"{guarded}/docs")
    _enter(tab, "wrong", remember=True)
    tab.until("document.querySelector('#key-dialog p')?.innerText.includes('refuses')")
    _enter(tab, KEY)
    tab.until("document.querySelector('#routes details')")
    other = browser.open(f"{guarded}/docs", beside=tab)
    other.until("document.querySelector('#routes details')")
    assert other.problems == []
    other.click("#top .icon-button")
    other.click("#key-dialog menu button")  # Forget
    assert other.run("[sessionStorage.length, localStorage.length]") == [0, 0]


@pytest.mark.deep
def test_a_link_to_metrics_sends_the_key(browser, guarded):
    tab = browser.open(f"{guarded}/docs")
    _enter(tab, KEY)
    tab.until("document.querySelector('#routes details')")
    tab.click("#top nav a[href$=metrics]")
    tab.until("document.body.innerText.includes('kiln:')")


def test_a_page_can_make_no_html_of_text_and_load_nothing_from_elsewhere(browser, unguarded):
    tab = browser.open(f"{unguarded}/docs")
    refused = "(() => { try { document.body.innerHTML = '<b>x</b>'; } catch { return true; } })()"
    assert tab.run(refused)
    elsewhere = "fetch('http://127.0.0.2:9/').then(() => false, () => true)"
    assert tab.run(elsewhere)
    assert any("connect-src" in problem for problem in tab.problems)
