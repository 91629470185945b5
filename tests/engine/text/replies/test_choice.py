"""The formats of a model's replies: by flags, else by its chat template."""

from __future__ import annotations

import pkgutil

import pytest

from kiln.engine.errors import ConfigError
from kiln.engine.text.replies import formats
from kiln.engine.text.replies.choice import choose_formats, tool_formats, tool_parsers

THINKING = "{% if '</think>' in content %}{% endif %}"


def test_a_format_is_a_file_and_no_name_is_used_twice():
    files = [found.name for found in pkgutil.iter_modules(formats.__path__)]
    names = [name for form in tool_formats() for name in form.names]
    assert len(tool_formats()) == len(files)
    assert len(set(names)) == len(names) == len(tool_parsers()) - 1


def test_a_model_without_a_known_template_has_no_format():
    found = choose_formats(["{% for message in messages %}{{ tools }}{% endfor %}"])
    assert (found.tools, found.reasoning) == (None, None)
    reader = found.reader([{"type": "function", "function": {"name": "f"}}])
    assert (
        reader.push("<tool_call>{}</tool_call>", last=True).content == "<tool_call>{}</tool_call>"
    )


def test_a_flag_overrides_the_template():
    template = "<tool_call>" + THINKING
    assert choose_formats([template]).tools.names[0] == "hermes"
    assert choose_formats([template], "mistral").tools.names[0] == "mistral"
    assert choose_formats([template], "none").tools is None
    assert choose_formats([template]).reasoning.names[0] == "qwen3"
    assert choose_formats([template], None, "deepseek_r1").reasoning.always
    assert choose_formats([template], None, "none").reasoning is None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("hermess", None), ["--tool-call-parser", "'hermess'", "did you mean hermes?", "mistral"]),
        (("x" * 200, None), ["'" + "x" * 80 + "'", "qwen3_coder"]),
        ((None, "qwen"), ["--reasoning-parser", "'qwen'", "did you mean qwen3?", "deepseek_r1"]),
        (("openai", "qwen3"), ["openai", "separates reasoning itself"]),
        (("hermes", "openai_gptoss"), ["hermes", "does not separate reasoning"]),
    ],
)
def test_an_unknown_name_is_an_error_that_lists_the_known_ones(flags, words):
    with pytest.raises(ConfigError) as error:
        choose_formats([], *flags)
    assert all(word in str(error.value) for word in words)


def test_the_reasoning_of_gpt_oss_is_the_format_of_its_calls():
    assert choose_formats([], None, "openai_gptoss").tools.names == ("openai",)
    assert choose_formats([], "openai", "openai_gptoss").reasoning is None


def test_marks_are_shown_where_something_reads_them():
    mistral = choose_formats([], "mistral", "mistral")
    assert "[TOOL_CALLS]" in mistral.marks(with_tools=True)
    assert mistral.marks(with_tools=False) == ("[THINK]", "[/THINK]")
    harmony = choose_formats([], "openai")
    assert harmony.marks(with_tools=False) == harmony.marks(with_tools=True)
    assert harmony.stops == ("<|call|>", "<|return|>")
