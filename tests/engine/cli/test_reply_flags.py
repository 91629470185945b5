"""The flags of tool calls and reasoning: vLLM's names, refused before a model is loaded."""

from __future__ import annotations

import argparse
import logging

import pytest

from kiln.engine.cli.flags import add_groups
from kiln.engine.cli.main import main
from kiln.engine.cli.reply_flags import reply_formats
from kiln.engine.cli.serve_flags import CHATS


def flags(*given):
    parser = argparse.ArgumentParser()
    add_groups(parser, (CHATS,))
    return parser.parse_args(given)


@pytest.mark.parametrize(
    "names",
    [
        ("hermes", "qwen3"),
        ("llama3_json", "deepseek_r1"),
        ("llama4_pythonic", "glm45"),
        ("pythonic", "kimi_k2"),
        ("mistral", "mistral"),
        ("qwen3_coder", "none"),
        ("qwen3_xml", "olmo3"),
        ("openai", "openai_gptoss"),
        ("glm47", "glm45"),
        ("deepseek_v3", "deepseek_v3"),
        ("deepseek_v31", "step3"),
        ("none", "none"),
    ],
)
def test_vllms_names_are_known(names):
    formats = reply_formats(flags("--tool-call-parser", names[0], "--reasoning-parser", names[1]))
    assert (formats.tools is None) == (names[0] == "none")
    assert formats.tools is None or names[0] in formats.tools.names


def test_a_wrong_name_ends_the_command_before_the_model_is_looked_for(capsys):
    assert main(["serve", "no/such/model", "--tool-call-parser", "hermess"]) == 1
    said = capsys.readouterr().err
    assert "did you mean hermes?" in said
    assert "no/such/model" not in said


def test_a_template_with_tools_in_no_known_format_is_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        reply_formats(flags(), ["{% if tools %}{{ tools }}{% endif %}"])
        (record,) = caplog.records
        assert "--tool-call-parser" in record.message
        caplog.clear()
        reply_formats(flags("--tool-call-parser", "none"), ["{% if tools %}{% endif %}"])
        reply_formats(flags(), ["{% if tools %}<tool_call>{% endif %}"])
        reply_formats(flags(), ["{{ messages }}"])
        assert not caplog.records
