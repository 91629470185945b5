"""Words are what a reader would take them for, or are refused: verbs, MODEL, values of lists."""

from __future__ import annotations

import pytest

from kiln.engine.cli.commands import serve
from kiln.engine.cli.main import build_parser
from kiln.engine.cli.options import lora_modules, model_of, served_names
from kiln.engine.cli.origins import read_origins
from kiln.engine.cli.parser import KilnParser
from kiln.engine.errors import ConfigError


def parse(*words):
    parser = KilnParser(prog="kiln serve")
    serve.add_arguments(parser)
    return parser.parse_args(list(words))


def read(args):
    served_names(args)
    model_of(args)
    lora_modules(args)
    read_origins(args.allowed_origins or ())


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A model's folder in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen").mkdir()
    (tmp_path / "qwen" / "config.json").write_text("{}")
    return "qwen"


@pytest.mark.parametrize(
    "words",
    [
        ("--lora-modules", "a=b", "c=d", "org/model"),
        ("--lora-modules", "a=b", "c=d", "--", "org/model"),
        ("--lora-modules", "a=b", "c=d", "org/model", "--port", "3"),
        ("org/model", "--lora-modules", "a=b", "c=d"),
        ("--lora-modules", "a=b", "--port", "3", "--lora-modules", "c=d", "--model=org/model"),
        ("--lora_modules", "a=b", "c=d", "--enforce-eager", "org/model"),
    ],
)
def test_the_model_may_stand_anywhere(words):
    args = parse(*words)
    assert model_of(args) == "org/model"
    assert [one.name for one in lora_modules(args)] == ["a", "c"]


def test_a_word_that_a_list_cannot_hold_is_the_model(model):
    args = parse("--cuda-graph-bs", "1", "2", "org/model")
    assert (model_of(args), args.cuda_graph_bs) == ("org/model", [1, 2])
    args = parse("--allowed-origins", "https://a.org", "null", "org/model", "--port", "3")
    assert (model_of(args), read_origins(args.allowed_origins)) == (
        "org/model",
        ("https://a.org", "null"),
    )
    args = parse("--served-model-name", "a", "b", model)
    assert (model_of(args), served_names(args)) == (model, ("a", "b"))
    args = parse("--served-model-name", "a", "b", f"./{model}/", "--lora-modules", "c=d")
    assert model_of(args) == f"./{model}/"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--served-model-name", "a", "b"), "'b' may be a name or MODEL: write MODEL before it"),
        (("--served-model-name", "a", "org/model"), "'org/model' may be a name or MODEL"),
        (("--served-model-name", "qwen"), "'qwen' may be a name or MODEL"),
        (("--lora-modules", "a=b", "c"), "--lora-modules 'c': want NAME=PATH"),
        (("--lora-modules", "org/model"), "write MODEL before it"),
        (("--allowed-origins", "a.org", "b.org"), "--allowed-origins 'a.org'"),
        (("m", "--lora-modules", "a=b", "org/model"), "give one of them"),
        (("--model", "m", "--lora-modules", "a=b", "o/m"), "--lora-modules 'o/m': want NAME="),
    ],
)
def test_what_cannot_be_told_apart_is_refused(model, words, says):
    with pytest.raises(ConfigError) as raised:
        read(parse(*words))
    assert says in str(raised.value)


def test_names_that_look_like_models_are_names_where_the_model_is_known(model):
    assert served_names(parse("m", "--served-model-name", "a", "org/b")) == ("a", "org/b")
    assert served_names(parse("m", "--served-model-name", "qwen")) == ("qwen",)
    words = ("--served-model-name", "a", "org/b", "--model", "m")
    assert served_names(parse(*words)) == ("a", "org/b")


def test_what_is_behind_two_hyphens_is_no_flag():
    assert model_of(parse("--port", "3", "--", "--odd_name")) == "--odd_name"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["sevre"], "there is no kiln sevre; did you mean kiln serve?"),
        (["SERVE"], "did you mean kiln serve?"),
        (["kernels", "lst"], "did you mean kiln kernels list?"),
        (["bench", "latncy"], "did you mean kiln bench latency?"),
        (["choices"], "did you mean kiln kernels choices?"),
        (["xyzzy"], "there are bench, chat, doctor"),
        (["complete"], "POST /v1/completions"),
        (["run-batch", "-i", "x"], "LLM.chat and LLM.generate"),
        (["collect-env"], "kiln doctor and kiln env"),
        (["bench", "serve"], "write kiln bench serving"),
        (["bench", "throughput"], "write kiln bench offline"),
        (["org/model"], "such as kiln serve org/model"),
        (["--port", "3", "serve"], "--port: write it behind the command: kiln serve --port"),
        (["--tp"], "--tp: a command comes first: one of bench"),
        (["bench"], "say what to do: one of kernels, latency"),
        (["serve", "m", "max_model_len=32"], "write --max-model-len=32"),
        (["serve", "m", "--", "n"], "'n': unexpected"),
    ],
)
def test_a_word_that_is_no_verb_says_what_to_write(capsys, words, says):
    with pytest.raises(SystemExit) as end:
        build_parser().parse_args(words)
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert says in said
    assert len(said.splitlines()) == 2
