"""The tokenizer: the same ids and texts as transformers, without importing it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers

from kiln.engine.errors import ConfigError, ModelError, RequestError
from kiln.engine.models.model_folder import ModelFiles
from kiln.engine.text.tokenizer import Tokenizer

KINDS = ["byte-level", "llama", "metaspace", "wordpiece"]
PROPERTY = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
TEXTS = st.one_of(
    st.text(max_size=40),
    st.lists(
        st.sampled_from(
            ["Hello", " ", "  ", "é", "日本", "😀", "<|im_end|>", "<s>", "</s>", "\n", "x1"]
        ),
        max_size=12,
    ).map("".join),
)


@pytest.fixture(scope="module")
def pairs(tokenizer_folders):
    from transformers import AutoTokenizer

    return {
        name: (Tokenizer.load(folder), AutoTokenizer.from_pretrained(str(folder)))
        for name, folder in tokenizer_folders.items()
    }


def change(folder, name, **changes):
    """Change some entries of one of a folder's JSON files."""
    path = folder / name
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | changes))


@pytest.fixture
def folder(tokenizer_folders, tmp_path):
    """A copy of the byte-level tokenizer's folder, to change."""
    return shutil.copytree(tokenizer_folders["byte-level"], tmp_path / "model")


@pytest.mark.parametrize("kind", KINDS)
@PROPERTY
@given(text=TEXTS)
def test_ids_and_texts_are_those_of_transformers(pairs, kind, text):
    ours, theirs = pairs[kind]
    for special in (True, False):
        ids = ours.encode(text, add_special_tokens=special)
        assert ids == theirs.encode(text, add_special_tokens=special)
        for skip in (True, False):
            expected = theirs.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
            assert ours.decode(ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize(
    ("kind", "known"), [*((kind, True) for kind in KINDS[:3]), ("wordpiece", False)]
)
@PROPERTY
@given(text=TEXTS, repeat=st.integers(1, 50))
def test_a_text_that_fits_is_never_said_to_exceed(pairs, kind, known, text, repeat):
    ours, text = pairs[kind][0], text * repeat
    count = len(ours.encode(text, add_special_tokens=False))
    assert not ours.surely_exceeds(text, count)
    assert ours.surely_exceeds("x" * 1_000_000, 100) == known


COMPOSING = [chr(c) for c in (0x212A, 0x1FBE, 0x308, 0x301, 0x1100, 0x1161, 0x11A8, 0x41)]
SETUPS = {
    "NFC": (normalizers.NFC(), None),
    "NFKC": (normalizers.NFKC(), None),
    "strip": (normalizers.Strip(), None),
    "replace": (normalizers.Replace("aa", "a"), None),
    "split": (None, pre_tokenizers.Split(" ", "removed")),
    "whitespace": (None, pre_tokenizers.Whitespace()),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize(("name", "known"), [(name, name == "NFC") for name in SETUPS])
@PROPERTY
@given(text=st.text(alphabet=st.sampled_from([*COMPOSING, " ", "a"]), max_size=60))
def test_a_normalizer_that_shortens_text_is_accounted_for(folder, name, known, text):
    backend = Tokenizer.load(folder).backend
    backend.normalizer, splitter = SETUPS[name]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*([splitter] if splitter else []), bytes_])
    tokenizer = Tokenizer(backend)
    assert not tokenizer.surely_exceeds(text, len(tokenizer.encode(text)))
    assert tokenizer.surely_exceeds("x" * 1_000_000, 100) == known


def test_an_added_token_that_swallows_spaces_leaves_no_bound(folder):
    backend = Tokenizer.load(folder).backend
    backend.add_special_tokens([AddedToken("<wide>", rstrip=True)])
    tokenizer = Tokenizer(backend)
    text = "<wide>" + " " * 100_000
    assert not tokenizer.surely_exceeds(text, len(tokenizer.encode(text)))


def test_other_threads_run_while_a_long_text_is_tokenised(pairs):
    tokenizer = pairs["byte-level"][0]
    text = "The quick brown fox, 1234. " * 20_000
    done, longest, begun = threading.Event(), 0.0, time.perf_counter()
    worker = threading.Thread(target=lambda: (tokenizer.encode(text), done.set()))
    worker.start()
    last = begun
    while not done.is_set():
        time.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    assert longest < (last - begun) / 2
    worker.join()


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_those_of_transformers(pairs, kind):
    ours, theirs = pairs[kind]
    assert ours.special_tokens == theirs.special_tokens_map
    added = theirs.added_tokens_decoder.items()
    assert ours.special_ids == {token_id for token_id, token in added if token.special}
    assert ours.eos_token_ids == {theirs.eos_token_id}
    assert ours.vocab_size == len(theirs)


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  Grüße, 日本! <tag> & 'quotes'  "},
    {"role": "assistant", "content": "Hi.", "reasoning": "They greet me.", "tool_calls": None},
    {"role": "user", "content": "2+2?"},
]
TEMPLATES = {
    "chatml": None,
    "bos and errors": (
        "{{ bos_token }}{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant']"
        " %}{{ raise_exception('role ' + m.role) }}{% endif %}[{{ m.role }}] {{ m.content | trim }}"
        "{% if m.reasoning_content is defined %}<{{ m.reasoning_content }}>{% endif %}"
        "{{ eos_token }}{% endfor %}"
    ),
    "whitespace control": (
        "{% set ns = namespace(n=0) %}\n    {% for m in messages %}\n  {% set ns.n = ns.n + 1 %}\n"
        "  {%- if m.role == 'system' %}{% continue %}{% endif %}\n{{ ns.n }}: {{ m.content }}\n"
        "  {% endfor %}\n{% if add_generation_prompt %}\nanswer:\n{% endif %}\n"
    ),
    "json and dates": (
        "{{ strftime_now('%Y-%m') }} {{ messages | tojson }} {{ messages[1] | tojson(indent=2) }}"
        "{% if tools %}{{ tools | tojson(sort_keys=true) }}{% endif %}{{ enable_thinking }}"
    ),
    "generation tag": (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    ),
}


@pytest.mark.parametrize("kind", ["byte-level", "llama"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_chats_are_rendered_and_encoded_as_transformers_does(pairs, kind, template, tmp_path):
    ours, theirs = pairs[kind]
    source = TEMPLATES[template] or theirs.chat_template
    mine = Tokenizer(
        ours.backend, special_tokens=ours.special_tokens, chat_templates={"default": source}
    )
    options = {
        "add_generation_prompt": True,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    }
    if "tools" not in source:  # a template that does not show them
        options["tools"] = None
    variables = {"enable_thinking": False}
    theirs_options = {**options, **variables, "chat_template": source}
    expected = theirs.apply_chat_template(CHAT, tokenize=False, **theirs_options)
    assert mine.render_chat(CHAT, **options, variables=variables).text == expected
    ids = theirs.apply_chat_template(CHAT, return_dict=False, **theirs_options)
    assert mine.apply_chat_template(CHAT, **options, variables=variables) == list(ids)


def test_a_bos_in_the_template_is_there_once(pairs):
    llama, _ = pairs["llama"]
    source = "{{ bos_token }}{{ messages[0].content }}"
    tokenizer = Tokenizer(
        llama.backend, special_tokens=llama.special_tokens, chat_templates={"default": source}
    )
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])
    assert ids.count(llama.backend.token_to_id("<s>")) == 1


def load_with_template(folder, source):
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    change(folder, "tokenizer_config.json", chat_template=source)
    return Tokenizer.load(folder)


def test_a_template_in_the_config_and_named_ones_are_found(folder):
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "with {{ tools | length }} tools"},
    ]
    tokenizer = load_with_template(folder, named)
    assert tokenizer.render_chat(CHAT).text == "plain"
    assert tokenizer.render_chat(CHAT, tools=[{}]).text == "with 1 tools"
    assert load_with_template(folder, "text").render_chat(CHAT).text == "text"
    (folder / "chat_template.jinja").write_text("a file comes first")
    assert Tokenizer.load(folder).render_chat(CHAT).text == "a file comes first"


@pytest.mark.parametrize("place", ["config", "files"])
def test_named_templates_are_those_of_transformers(folder, place):
    from transformers import AutoTokenizer

    named = {
        "default": "plain {{ messages[0].content }}",
        "tool_use": "{{ tools | length }} tools",
        "rag": "of documents",
    }
    if place == "files":
        change(folder, "tokenizer_config.json", chat_template="replaced by files")
        (folder / "chat_template.jinja").write_text(named["default"])
        (folder / "additional_chat_templates").mkdir()
        for name in ("tool_use", "rag"):
            path = folder / "additional_chat_templates" / f"{name}.jinja"
            path.write_text(named[name])
    else:
        listed = [{"name": name, "template": text} for name, text in named.items()]
        change(folder, "tokenizer_config.json", chat_template=listed)
        (folder / "chat_template.jinja").unlink(missing_ok=True)
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    for tools in (None, [{}]):
        text = theirs.apply_chat_template(CHAT, tools=tools, tokenize=False)
        assert ours.render_chat(CHAT, tools=tools).text == text
    text = theirs.apply_chat_template(CHAT, chat_template="rag", tokenize=False)
    for tokenizer in (Tokenizer.load(folder, "rag"), ours):
        template = None if tokenizer is not ours else ours.other_template("rag")
        assert tokenizer.render_chat(CHAT, chat_template=template).text == text == "of documents"
    with pytest.raises(ConfigError, match=r"a name of the model's own: default, \w+, \w+$"):
        ours.other_template("rags")


def test_templates_without_a_default_are_named(folder):
    tokenizer = load_with_template(folder, [{"name": "rag", "template": "x"}])
    with pytest.raises(RequestError, match="only templates named rag: choose one by --chat-templ"):
        tokenizer.render_chat(CHAT)
    assert Tokenizer.load(folder, "rag").render_chat(CHAT).text == "x"


def test_the_file_of_a_processor_is_the_template_where_there_is_no_other(folder):
    (folder / "chat_template.json").write_text('{"chat_template": "of a processor"}')
    assert load_with_template(folder, "text").render_chat(CHAT).text == "text"
    assert load_with_template(folder, None).render_chat(CHAT).text == "of a processor"


@pytest.mark.parametrize(
    "given", [5, [5], ["x"], [{"name": "default"}], {"default": 5}, [{"name": 1, "template": "x"}]]
)
def test_what_is_no_template_is_a_model_error(folder, given):
    with pytest.raises(
        ModelError, match=r"tokenizer_config\.json: chat_template is .*, want a text"
    ):
        load_with_template(folder, given)


def test_a_template_file_that_is_no_text_is_a_model_error(folder):
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"chat_template\.jinja: cannot be read"):
        Tokenizer.load(folder)


@pytest.mark.parametrize(
    ("source", "messages", "message"),
    [
        ("{{ raise_exception('no system role') }}", CHAT, "no system role"),
        ("{{ messages[0].nothing.at.all }}", CHAT, "has no attribute 'nothing'"),
        ("{{ messages[0].content + 1 }}", CHAT, "concatenate|must be str"),
        ("{{ ''.__class__.__mro__ }}", CHAT, "unsafe"),
        ("{{ messages.append(1) }}", CHAT, "unsafe|not safely callable"),
        ("{{ 1 // 0 }}", CHAT, "division"),
        ("{{ 10.0 ** 1000 }}", CHAT, "too large|out of range"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", CHAT, "recursion"),
        (
            "{% for i in range(99999) %}{% for m in range(99999) %}" + "x" * 999 + "{% endfor %}"
            "{% endfor %}",
            CHAT,
            "renders more than",
        ),
        ("x", [], "messages is empty"),
        ("x", ["hello"], "must be objects"),
    ],
)
def test_a_chat_that_the_template_refuses_is_a_request_error(pairs, source, messages, message):
    backend = pairs["byte-level"][0].backend
    tokenizer = Tokenizer(backend, chat_templates={"default": source})
    with pytest.raises(RequestError, match=message) as caught:
        tokenizer.render_chat(messages)
    assert caught.value.param.startswith("messages")


def test_a_model_without_a_template_says_what_to_do(pairs):
    tokenizer = Tokenizer(pairs["byte-level"][0].backend)
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="no chat template: send a prompt to completions"):
        tokenizer.render_chat(CHAT)


def test_a_template_that_does_not_parse_is_a_model_error_with_its_line(folder):
    with pytest.raises(ModelError, match="line 2"):
        load_with_template(folder, "fine\n{% for %}")


def test_a_missing_or_broken_tokenizer_is_a_model_error_naming_the_file(tmp_path):
    assert Tokenizer.load_if_present(tmp_path) is None
    with pytest.raises(ModelError, match=r"no tokenizer \(tokenizer.json or"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type":')
    with pytest.raises(ModelError, match=r"tokenizer\.json: cannot be read"):
        Tokenizer.load(tmp_path)


def test_eos_comes_from_the_generation_config_and_the_tokenizer(folder):
    change(folder, "config.json", eos_token_id=40)
    assert Tokenizer.load(folder).eos_token_ids == {40, 2}
    change(folder, "generation_config.json", eos_token_id=[50, 60])
    assert Tokenizer.load(folder).eos_token_ids == {50, 60, 2}


def test_tokens_added_only_in_the_config_are_known(folder):
    from transformers import AutoTokenizer

    next_id = Tokenizer.load(folder).vocab_size
    token = {
        "content": "<tool>",
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": True,
    }
    change(folder, "tokenizer_config.json", added_tokens_decoder={str(next_id): token})
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(str(folder))
    assert ours.encode("a<tool>b") == theirs.encode("a<tool>b")
    assert next_id in ours.special_ids


PLAIN = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
BESIDE = {  # what stands in the files beside tokenizer.json; None takes an entry out
    "added_tokens.json": {
        "tokenizer_config": {"added_tokens_decoder": None, "pad_token": "<pad>"},
        "added_tokens": {"<tool>": 402, "<pad>": 401, "<|im_end|>": 2, "<Café>": 400},
    },
    "additional_special_tokens": {"tokenizer_config": {"additional_special_tokens": ["<tool>"]}},
    "extra_special_tokens": {"tokenizer_config": {"extra_special_tokens": ["<tool>", "<pad>"]}},
    "named extra_special_tokens": {
        "tokenizer_config": {"extra_special_tokens": {"image_token": "<tool>"}}
    },
    "a token of the model's own": {"tokenizer_config": {"image_token": "<tool>"}},
    "special_tokens_map.json": {
        "tokenizer_config": {"added_tokens_decoder": None},
        "special_tokens_map": {
            "additional_special_tokens": ["<tool>"],
            "pad_token": {**PLAIN, "content": "<pad>", "lstrip": True},
        },
    },
    "extra_special_tokens in the map": {
        "tokenizer_config": {"added_tokens_decoder": None},
        "special_tokens_map": {"extra_special_tokens": ["<tool>", {**PLAIN, "content": "<pad>"}]},
    },
    "the map and added_tokens.json": {
        "tokenizer_config": {"added_tokens_decoder": None, "extra_special_tokens": ["<tool>"]},
        "special_tokens_map": {"pad_token": "<pad>"},
        "added_tokens": {"<tool>": 401, "<pad>": 400},
    },
    "other properties of a known token": {
        "tokenizer_config": {
            "added_tokens_decoder": {
                "1": {**PLAIN, "content": "<|im_start|>", "rstrip": True, "special": False}
            }
        }
    },
    "split_special_tokens": {"tokenizer_config": {"split_special_tokens": True}},
    "add_bos_token": {"tokenizer_config": {"add_bos_token": True, "bos_token": "<|im_start|>"}},
    "add_prefix_space": {"tokenizer_config": {"add_prefix_space": True}},
    "add_prefix_space of GPT2": {
        "tokenizer_config": {
            "add_prefix_space": True,
            "tokenizer_class": "GPT2Tokenizer",
            **{"bos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"},
        }
    },
}


@pytest.mark.parametrize("case", BESIDE)
def test_the_files_beside_tokenizer_json_are_read_as_transformers_does(folder, case):
    for name, entries in BESIDE[case].items():
        change(folder, f"{name}.json", **entries)
        content = json.loads((folder / f"{name}.json").read_text())
        kept = {key: value for key, value in content.items() if value is not None}
        (folder / f"{name}.json").write_text(json.dumps(kept))
    check_against_transformers(folder)


@pytest.mark.parametrize("prefix", [True, False, None])
def test_a_prefix_space_of_llama_is_added_as_transformers_does(tokenizer_folders, tmp_path, prefix):
    folder = shutil.copytree(tokenizer_folders["llama"], tmp_path / "model")
    settings = {"tokenizer_class": "LlamaTokenizerFast", "add_prefix_space": prefix}
    change(folder, "tokenizer_config.json", **settings)
    check_against_transformers(folder, "Hello", "two words")


def check_against_transformers(folder, *texts):
    from transformers import AutoTokenizer

    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(str(folder))
    for text in texts or ("a<tool>b", "Hello  <pad> x", "1<|im_start|>  y<|im_end|>", "z<CAFÉ> "):
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.special_tokens == theirs.special_tokens_map
    added = theirs.added_tokens_decoder.items()
    assert ours.special_ids == {token_id for token_id, token in added if token.special}
    assert ours.vocab_size == len(theirs)
    assert ours.eos_token_ids == {theirs.eos_token_id}


def test_truncation_and_padding_in_the_file_change_no_prompt(folder):
    length = len(Tokenizer.load(folder).encode("Hello, world! " * 9))
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 900},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    change(folder, "tokenizer.json", truncation=truncation, padding=padding)
    assert len(Tokenizer.load(folder).encode("Hello, world! " * 9)) == length


def test_an_older_form_is_converted(tokenizer_folders, tmp_path):
    folder = tokenizer_folders["byte-level"]
    state = json.loads((folder / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(state["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in state["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    converted, original = Tokenizer.load_if_present(tmp_path), Tokenizer.load(folder)
    assert converted is not None
    assert converted.encode("Hello, world!") == original.encode("Hello, world!")


def test_loading_imports_neither_transformers_nor_torch(tokenizer_folders):
    program = (
        "import sys; from pathlib import Path; from kiln.engine.text.tokenizer import Tokenizer;"
        f"Tokenizer.load(Path({str(tokenizer_folders['byte-level'])!r})).encode('hello');"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    path = next(entry for entry in sys.path if entry.endswith("import_root"))
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.strip() == "[]"


def test_another_tokenizer_brings_its_files_and_the_model_its_vocabulary(
    tokenizer_folders, tmp_path
):
    (tmp_path / "config.json").write_text('{"vocab_size": 40, "eos_token_id": 7}')
    other = tokenizer_folders["llama"]
    ours, theirs = Tokenizer.load(ModelFiles(tmp_path, tokenizer=other)), Tokenizer.load(other)
    assert ours.encode("hello") == theirs.encode("hello")
    assert ours.chat_template_sources == theirs.chat_template_sources
    assert ours.eos_token_ids == {7, *(one for one in theirs.eos_token_ids if one < 40)}
    assert Tokenizer.load_if_present(ModelFiles(tmp_path)) is None
