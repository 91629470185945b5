"""Chats of models with a tekken.json and no chat template: the tokens of mistral-common."""

from __future__ import annotations

import json

import pytest
from tekken_files import split, tekken, write_tekken

from kiln import LLM, SamplingParams
from kiln.engine.errors import ModelError, RequestError
from kiln.engine.text.prompts import read_chats
from kiln.engine.text.replies.choice import choose_formats
from kiln.engine.text.tokenizer import Tokenizer

mistral_common = pytest.importorskip("mistral_common", reason="is in the extras mistral and dev")

VERSIONS = ("v3", "v7", "v11", "v13")
ID = "abcdefgh1"
USER = {"role": "user", "content": "the hello"}
SYSTEM = {"role": "system", "content": "world"}
YES = {"role": "assistant", "content": "in an"}
CALL = {
    "role": "assistant",
    "tool_calls": [
        {"id": ID, "type": "function", "function": {"name": "see", "arguments": '{"at": "日"}'}}
    ],
}
ANSWER = {"role": "tool", "tool_call_id": ID, "content": "42"}
TOOL = {
    "type": "function",
    "function": {"name": "see", "description": "", "parameters": {"type": "object"}},
}
CHATS = {
    "a question": ([USER], None),
    "a system message": ([SYSTEM, USER, YES, USER], None),
    "tools": ([SYSTEM, USER], [TOOL]),
    "a call and its answer": ([USER, CALL, ANSWER], [TOOL]),
    "an answer about it": ([USER, CALL, ANSWER, YES, USER], [TOOL]),
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    return {
        version: Tokenizer.load(write_tekken(tmp_path_factory.mktemp(version), version=version))
        for version in VERSIONS
    }


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A function from a version, messages and tools to the tokens of mistral-common."""
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    def ids(version, messages, tools=None):
        path = write_tekken(tmp_path_factory.mktemp(version), version=version) / "tekken.json"
        request = ChatCompletionRequest.from_openai(messages, tools=tools)
        return MistralTokenizer.from_file(str(path)).encode_chat_completion(request).tokens

    return ids


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", CHATS)
def test_chats_are_those_of_mistral_common(tokenizers, library, version, name):
    messages, tools = CHATS[name]
    [prompt] = read_chats(messages, tokenizers[version], 10**6, tools=tools)
    assert prompt.token_ids == library(version, messages, tools)
    assert prompt.text == tokenizers[version].decode(prompt.token_ids, skip_special_tokens=False)
    assert prompt.text.startswith("<s>[")


@pytest.mark.parametrize("version", VERSIONS)
def test_texts_have_the_ids_that_mistral_common_gives_them(tokenizers, library, version):
    text = "  hello the 日本語 12\n\n wor"
    ids = library(version, [{"role": "user", "content": text}])
    assert tokenizers[version].encode(text, add_special_tokens=False) == ids[2:-1]


def test_what_a_message_says_becomes_no_special_token(tokenizers):
    said = "[/INST]</s>[INST]"
    ids = tokenizers["v3"].apply_chat_template([{"role": "user", "content": said}])
    content = {**tekken(), "special_tokens": []}
    assert ids == [1, 3, *split(content, said), 4]


PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
# Messages in the forms of clients, and in the form that the library takes in every version.
FORMS = {
    "parts": ({"role": "user", "content": PARTS}, {"role": "user", "content": "a\n\nb"}),
    "a developer": ({**SYSTEM, "role": "developer"}, SYSTEM),
    "no content": ({**CALL, "content": None}, CALL),
    "an empty content": ({**CALL, "content": ""}, CALL),
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("form", FORMS)
def test_messages_may_have_the_forms_of_clients(tokenizers, library, version, form):
    given, plain = FORMS[form]
    around = [USER, None, ANSWER] if plain is CALL else [None, USER]
    ours, theirs = ([one or own for one in around] for own in (given, plain))
    assert tokenizers[version].apply_chat_template(ours) == library(version, theirs)


@pytest.mark.parametrize("version", VERSIONS)
def test_ids_of_calls_from_other_servers_are_made_to_fit(tokenizers, version):
    def chat(call_id):
        call = {**CALL, "tool_calls": [{**CALL["tool_calls"][0], "id": call_id}]}
        return [USER, call, {**ANSWER, "tool_call_id": call_id}]

    first, again, other = (
        tokenizers[version].render_chat(chat(name), tools=[TOOL])
        for name in ("call_1/日", "call_1/日", "call_2")
    )
    assert first == again
    assert "call_1" not in first.text
    assert (first != other) == (version != "v13")  # which shows no ids


def test_a_tool_may_have_no_parameters(tokenizers, library):
    bare = {"type": "function", "function": {"name": "see"}}
    full = {"type": "function", "function": {"name": "see", "description": "", "parameters": {}}}
    [prompt] = read_chats([USER], tokenizers["v7"], 10**6, tools=[bare])
    assert prompt.token_ids == library("v7", [USER], [full])


@pytest.mark.parametrize("version", VERSIONS)
def test_a_message_is_continued_without_an_end(tokenizers, version):
    tokenizer = tokenizers[version]
    text, ids = tokenizer.render_chat([USER, YES], continue_final_message=True)
    assert text == "<s>[INST]the hello[/INST]in an"
    asked = tokenizer.apply_chat_template([USER])
    assert ids == asked + tokenizer.encode("in an", add_special_tokens=False)


@pytest.mark.parametrize("version", VERSIONS)
def test_reasoning_is_shown_to_models_that_read_it(tokenizers, version):
    thought = {**YES, "reasoning_content": "hm"}
    text, _ = tokenizers[version].render_chat([USER, thought, USER])
    shown = "[THINK]hm[/THINK]" if version == "v13" else ""
    assert text == f"<s>[INST]the hello[/INST]{shown}in an</s>[INST]the hello[/INST]"


def test_variables_that_the_model_does_not_read_change_nothing(tokenizers):
    variables = {"enable_thinking": True, "reasoning_effort": "high"}
    for tokenizer in tokenizers.values():
        plain = tokenizer.render_chat([USER])
        assert tokenizer.render_chat([USER], variables=variables) == plain
        assert tokenizer.render_chat([USER], add_generation_prompt=False) == plain


@pytest.mark.parametrize(
    ("messages", "options", "problem"),
    [
        ([], {}, "messages must be a list of messages, with at least one"),
        ([USER, YES], {}, "mistral-common.* does not accept these messages: Expected last role"),
        ([YES, SYSTEM, USER], {}, "does not accept"),
        ([USER, {"role": "critic", "content": "x"}], {}, "does not accept"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "only text"),
        ([{"role": "user", "content": "\ud800"}], {}, "surrogate"),
        ([USER], {"continue_final_message": True}, "needs a last message of the assistant"),
        ([USER], {"add_special_tokens": True}, "this model's chats are tokens, with a BOS"),
        ([{"role": "user", "content": " " * 3_000_000}], {}, "does not accept|has .* characters"),
    ],
)
def test_what_the_library_refuses_is_a_request_error(tokenizers, messages, options, problem):
    with pytest.raises(RequestError, match=problem) as caught:
        read_chats(messages, tokenizers["v7"], 1000, **options)
    assert len(str(caught.value)) < 500


def test_its_special_tokens_show_the_format_of_replies(tokenizers):
    formats = choose_formats(tokenizers["v13"].chat_template_sources)
    assert formats.tools.names == formats.reasoning.names == ("mistral",)
    assert tokenizers["v13"].has_chat_template


def test_a_template_may_be_given_in_its_place(tokenizers):
    other = tokenizers["v7"].other_template("{{ bos_token }}{{ messages[0].content }}")
    assert tokenizers["v7"].render_chat([USER], chat_template=other).text == "<s>the hello"


def test_a_file_that_the_library_cannot_read_is_a_model_error(tmp_path):
    with pytest.raises(ModelError, match=r"tekken\.json: mistral-common cannot read it: .*v99"):
        Tokenizer.load(write_tekken(tmp_path, version="v99"))


def test_a_model_answers_chats_and_texts(tmp_path, small_config, library):
    size = tekken()["config"]["default_vocab_size"]
    config = small_config("LlamaForCausalLM", vocab_size=size, dtype="float32")
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_tekken(tmp_path, version="v7")
    params = SamplingParams(max_tokens=5, seed=1)
    with LLM(str(tmp_path), device="cpu", load_format="dummy", num_kv_blocks=8) as llm:
        [out] = llm.chat([USER], params)
        assert out.prompt_token_ids == library("v7", [USER])
        [text] = llm.generate("hello", params)
        assert text.prompt_token_ids == [1, *split(tekken(), "hello")]
        tokens = out.outputs[0].token_ids
        assert out.outputs[0].text == llm.tokenizer.decode([one for one in tokens if one != 2])
