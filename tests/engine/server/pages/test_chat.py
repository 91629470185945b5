"""What a user does in the chat page."""

import json

import pytest
from page_engine import HANGS

from kiln.engine.errors import EngineDeadError


def _sent(tab):
    """Record the bodies that the page sends, in ``sent``."""
    tab.run(
        """(() => { const real = fetch; globalThis.sent = [];
        globalThis.fetch = (url, options) => {
          if (options?.body) sent.push(JSON.parse(options.body));
          return real(url, options);
        }; })()"""
    )


def test_an_answer_is_shown_and_the_next_question_sends_the_conversation(chat):
    page = chat({"first": "one", "second": "two"})
    _sent(page.tab)
    page.ask("first")
    page.ask("second")
    assert page.answer() == "two"
    said = [(one["role"], one["content"]) for one in page.tab.run("sent")[1]["messages"]]
    assert said == [("user", "first"), ("assistant", "one"), ("user", "second")]
    assert page.tab.problems == []


def test_a_new_chat_during_an_answer_begins_with_nothing_and_stops_the_answer(chat):
    page = chat({"old": "part" + HANGS, "new": "all"})
    _sent(page.tab)
    page.ask("old", ends=False)
    page.tab.until("document.querySelector('.turn.assistant .body').innerText.includes('part')")
    page.tab.click("#fresh")
    page.ask("new")
    assert [one["content"] for one in page.tab.run("sent")[1]["messages"]] == ["new"]
    assert len(page.engine.aborted) == 1
    assert page.answer() == "all"


@pytest.mark.deep
def test_escape_and_the_button_stop_an_answer_and_keep_what_arrived(chat):
    page = chat({"long": "as far as this" + HANGS})
    for stop in (lambda: page.tab.press("Escape"), lambda: page.tab.click("#send")):
        page.ask("long", ends=False)
        page.tab.until("document.querySelector('.busy .body')?.innerText.includes('as this')")
        stop()
        page.until_ended()
        assert page.answer() == "as far as this"
        assert "stopped" in page.tab.run("[...document.querySelectorAll('.note')].at(-1).innerText")
    assert len(page.engine.aborted) == 2


@pytest.mark.deep
def test_shift_enter_begins_a_line(chat):
    page = chat({"a": "b"})
    page.tab.click("#input")
    page.tab.write("one")
    page.tab.press("Enter", shift=True)
    page.tab.write("two")
    assert page.tab.run("document.getElementById('input').value") == "one\ntwo"


def test_a_new_answer_and_an_edited_question_stand_beside_the_old(chat):
    page = chat({"ask": ["first answer", "second answer"], "edited": "third answer"})
    page.ask("ask")
    page.tab.click("[aria-label='Answer again']")
    page.tab.until("document.querySelector('.versions')?.innerText.includes('2/2')")
    page.until_ended()
    assert page.answer() == "second answer"
    page.tab.click(".turn.user [aria-label='Edit the message']")
    page.tab.run("document.querySelector('.edit textarea').select()")
    page.tab.write("edited")
    page.tab.press("Enter")
    page.tab.until("document.querySelector('.turn.user .versions')?.innerText.includes('2/2')")
    page.until_ended()
    assert page.answer() == "third answer"
    assert page.engine.prompts[-1].count("edited") == 1
    assert "ask" not in page.engine.prompts[-1].split("<|im_start|>user", 1)[1]
    page.tab.click(".turn.user .versions [aria-label='Version before']")
    assert page.answer() == "second answer"
    page.tab.click(".turn.assistant .versions [aria-label='Version before']")
    assert page.answer() == "first answer"


def test_settings_are_sent_and_reset(chat):
    page = chat({"x": "y"})
    page.set(
        system="Be brief.", temperature="0.5", top_k="7", max_tokens="50", seed="3", stop="END"
    )
    page.ask("x")
    params = page.engine.requests[0].params
    assert (params.temperature, params.top_k, params.max_tokens, params.seed) == (0.5, 7, 50, 3)
    assert list(params.stop_strings) == ["END"]
    assert "Be brief." in page.engine.prompts[0]
    page.tab.go(page.url)
    page.tab.until("document.querySelector('#model option')")  # it knows the model's own values
    page.tab.click("#open-settings")
    kept = "document.querySelector('#settings [name=temperature]')"
    assert page.tab.run(f"{kept}.value") == "0.5"
    page.tab.click("#settings menu button")
    assert page.tab.run(f"[{kept}.value, {kept}.placeholder]") == ["", "1"]  # the model's own


@pytest.mark.deep
def test_a_wrong_setting_is_never_sent(chat):
    page = chat({"x": "y"})
    page.tab.click("#open-settings")
    page.tab.click("#settings [name=tools]")
    page.tab.write("[{]")
    page.tab.click("#settings menu .main")
    assert page.tab.run("document.getElementById('settings').open")
    page.tab.press("Escape")
    page.ask("x")
    assert page.answer() == "y"


TOOL = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def test_a_tool_call_is_folded_and_answered_by_hand(chat, fits):
    page = chat({"weather": [CALL, "Cold."]})
    page.set(tools=json.dumps(TOOL))
    page.ask("weather?")
    assert not page.tab.run("document.querySelector('.fold.call').open")
    page.tab.click(".fold.call summary")
    assert page.tab.text(".fold.call pre") == '{\n  "city": "Oslo"\n}'
    page.tab.click(".respond textarea")
    page.tab.write('{"degrees": -7}')
    fits(page.tab, "chat-tool")
    page.tab.click(".respond .main")
    page.tab.until("document.body.innerText.includes('Cold.')")
    page.until_ended()
    assert '{"degrees": -7}' in page.engine.prompts[1]
    assert "answered" in page.tab.text(".fold.call summary")
    assert page.tab.problems == []


def test_reasoning_is_folded_with_its_duration(chat, fits):
    page = chat({"think": "<think>\nOne step.\nAnother.\n</think>\n\nDone."})
    page.ask("think")
    assert page.answer().endswith("Done.")
    assert "Thought for" in page.tab.text(".fold.thought summary")
    assert not page.tab.run("document.querySelector('.fold.thought').open")
    page.tab.click(".fold.thought summary")
    assert page.tab.text(".thought .inside") == "One step.\nAnother."
    fits(page.tab, "chat-reasoning")


def test_log_probabilities_are_shown_on_hover_and_by_arrow_keys(chat, fits):
    page = chat({"x": "Grüße, it is likely that this is true."})
    page.set(logprobs="5")
    page.ask("x")
    assert page.tab.text(".tokens").replace("·", "").startswith("Grüße, it is likely that this is ")
    page.tab.click(".tokens .token:nth-child(3)")
    page.tab.until("!document.getElementById('token-card').hidden")
    assert page.tab.run("document.querySelectorAll('#token-card tbody tr').length") == 5
    before = page.tab.text("#token-card")
    page.tab.press("ArrowRight")
    assert page.tab.text("#token-card") != before
    page.tab.press("Escape")
    assert page.tab.run("document.getElementById('token-card').hidden")
    page.tab.press("ArrowRight")
    assert page.tab.run("!document.getElementById('token-card').hidden")
    fits(page.tab, "chat-tokens")
    page.tab.click(".actions .text-button")
    assert "Grüße" in page.tab.text(".markdown")
    assert page.tab.problems == []


def test_an_error_shows_the_servers_message_and_can_be_tried_again(chat, fits):
    page = chat({"x": [EngineDeadError("the engine died: out of memory"), "well again"]})
    page.ask("x")
    assert "out of memory" in page.tab.text(".failure")
    fits(page.tab, "chat-error")
    page.tab.click(".failure .button")
    page.tab.until("document.body.innerText.includes('well again')")
    page.until_ended()
    page.tab.problems.clear()


def test_a_server_that_loads_is_waited_for(chat, fits):
    page = chat({"x": "y"}, unready="the model is loading: 40 % of the weights")
    page.tab.until("document.getElementById('state').innerText.includes('40 %')")
    page.tab.click("#input")
    page.tab.write("x")
    fits(page.tab, "chat-loading")
    assert page.tab.run("document.getElementById('send').disabled")
    page.engine.unready = ""
    page.tab.until("document.getElementById('state').innerText === ''")
    page.tab.click("#send")
    page.until_ended()
    assert page.answer() == "y"
