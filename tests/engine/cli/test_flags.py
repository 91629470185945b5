"""Each flag is a row of a table; vLLM's names work, do nothing by right, or are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from kiln.engine.cli.commands import serve
from kiln.engine.cli.engine_flags import ENGINE, LORA
from kiln.engine.cli.main import build_parser, main
from kiln.engine.cli.neutral_flags import NEUTRAL
from kiln.engine.cli.options import engine_config, engine_flags, model_of
from kiln.engine.cli.parser import KilnParser
from kiln.engine.cli.serve_flags import LOGS, SERVER, TLS
from kiln.engine.cli.vllm_flags import ABSENT
from kiln.engine.config import EngineConfig, LoRAModule
from kiln.engine.errors import ConfigError

VALUES = {"--dtype": "float16", "--load-format": "dummy", "--kv-cache-dtype": "fp8"}
VALUES |= {"--scheduling-policy": "priority", "--task": "embed"}
VALUES |= {"--log-level": "error", "--log-format": "json"}
VALUES |= {"--hf-overrides": '{"rope_theta": 3}'}
VALUES |= {"--device": "cpu", "--lora-root": "adapters", "--gpu-memory-utilization": "0.5"}
EVERY = [flag for _, flags in (*ENGINE, LORA, LOGS) for flag in flags if flag.setting]


def parse(*words):
    parser = KilnParser(prog="kiln serve")
    serve.add_arguments(parser)
    return parser.parse_args(list(words))


def _line(flag, name):
    return [name] if flag.switch is not None else [name, VALUES.get(flag.name, "3")]


def _config(args):
    if args.max_loras or args.max_lora_rank or args.lora_memory_gib:
        args.lora_root = "adapters"  # without which these three are refused
    return engine_config(args, Path("model"))


@pytest.mark.parametrize("flag", EVERY, ids=lambda flag: flag.name)
def test_every_name_of_a_flag_fills_its_setting(flag):
    configs = {repr(_config(parse("m", *_line(flag, name)))) for name in flag.names.split()}
    assert len(configs) == 1
    config = _config(parse("m", *_line(flag, flag.name)))
    part, _, field = flag.setting.partition(".")
    untouched = getattr(engine_config(parse("m"), Path("model")), part)
    assert getattr(getattr(config, part), field) != getattr(untouched, field)


@pytest.mark.parametrize(
    "flag",
    [flag for flag in EVERY if not flag.setting.startswith(("lora", "logs"))],
    ids=lambda f: f.name,
)
def test_another_kiln_gets_the_same_settings(flag):
    args = parse("m", *_line(flag, flag.name))
    assert engine_config(parse(*engine_flags(args)), Path("model")) == _config(args)


@pytest.mark.parametrize("words", [["serve"], ["chat"], ["bench", "latency"]])
@pytest.mark.parametrize(
    ("name", "dtype"), [("half", "float16"), ("bf16", "bfloat16"), ("FP32", "float32")]
)
def test_every_command_with_an_engine_knows_the_names_of_dtypes(words, name, dtype):
    args = build_parser().parse_args([*words, "--dtype", name])
    assert engine_config(args, Path("m")).model.dtype == dtype


def test_names_may_have_underscores_and_vllms_dtypes():
    args = parse("--model", "m", "--max_model_len=32", "--dtype", "half", "-tp", "2")
    config = engine_config(args, Path("m"))
    assert (config.model.max_model_len, config.model.dtype) == (32, "float16")
    assert config.parallel.tensor_parallel_size == 2


def test_no_name_is_in_two_tables():
    ours = [
        name
        for _, flags in (*ENGINE, LORA, SERVER, TLS, LOGS)
        for one in flags
        for name in one.names.split()
    ]
    assert len(set(ours)) == len(ours)
    assert not set(ours) & (set(NEUTRAL) | set(ABSENT))


def test_flags_that_say_what_kiln_does_anyway_change_nothing():
    words = [word for name, values in NEUTRAL.items() for word in (name, *values[:1])]
    assert vars(parse("m", *words)) == vars(parse("m"))
    assert engine_config(parse("m", *words), Path("m")) == engine_config(parse("m"), Path("m"))


@pytest.mark.parametrize("name", sorted(ABSENT))
def test_other_flags_of_vllms_are_refused_by_name(capsys, name):
    if NEUTRAL.get(name) == ():
        return
    with pytest.raises(SystemExit) as end:
        parse("m", name, "other")
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert f"Kiln has no {name}" in said
    assert ABSENT[name] in said
    assert len(said.splitlines()) == 2


def test_the_values_with_a_meaning_are_refused_where_others_are_neutral():
    assert all(ABSENT[name] for name, values in NEUTRAL.items() if values)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["serve", "--max-model-ln", "3"], "did you mean --max-model-len?"),
        (["serve", "--max-model"], "did you mean --max-model-len?"),
        (["warmup", "--mdel", "x"], "did you mean --model?"),
        (["bench", "serving", "--num-prompt", "3"], "did you mean --num-prompts?"),
        (["serve", "--xyzzy"], "unknown flag --xyzzy"),
        (["serve", "--hf-overrides.rope_theta", "3"], "write --hf-overrides '{\"rope_theta\": …}'"),
        (["serve", "a", "b"], "'b': unexpected"),
    ],
)
def test_an_unknown_flag_names_the_nearest(capsys, words, hint):
    with pytest.raises(SystemExit) as end:
        build_parser().parse_args(words)
    assert end.value.code == 2
    assert hint in capsys.readouterr().err


def test_the_model_is_given_once():
    assert model_of(parse("m")) == model_of(parse("--model", "m")) == "m"
    with pytest.raises(ConfigError, match="give one of them"):
        model_of(parse("m", "--model", "other"))


def test_adapters_may_be_given_in_vllms_json():
    args = parse("m", "--enable-lora", "--lora-modules", '{"name": "a", "path": "b"}', "c=d")
    config = engine_config(args, Path("m"))
    assert isinstance(config, EngineConfig)
    assert config.lora.modules == (LoRAModule("a", "b"), LoRAModule("c", "d"))


def test_kiln_alone_prints_its_help(capsys):
    assert main([]) == 0
    assert "serve" in capsys.readouterr().out
