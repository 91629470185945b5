"""A wrong command line ends with a code other than 0 and one or two lines that say why."""

import json
import socket
import struct

import pytest

from kiln.engine.cli.main import build_parser
from kiln.engine.cli.options import engine_config
from kiln.engine.core import load_runner
from kiln.engine.errors import KilnError
from kiln.engine.process import child


def _failed(result, code, *words):
    assert result.returncode == code, result.stderr
    _told(result.stderr, *words)


def _told(text, *words):
    lines = text.strip().splitlines()
    lines = [line for line in lines if not line.endswith("…") and " INFO kiln." not in line]
    assert 1 <= len(lines) <= 2, text
    assert lines[0].startswith("error: ")
    for word in words:
        assert word in text
    assert "Traceback" not in text


def _unknown_architecture(folder):
    folder(architectures=["ElephantForCausalLM"], model_type="elephant")
    return ["--load-format", "dummy"], ["Elephant"]


def _no_weights(folder):
    folder()
    return [], ["safetensors"]


def _half_downloaded(folder):
    index = {"weight_map": {"model.embed_tokens.weight": "model-00001-of-00002.safetensors"}}
    (folder() / "model.safetensors.index.json").write_text(json.dumps(index))
    return [], ["model-00001-of-00002.safetensors"]


def _truncated_weights(folder):
    header = json.dumps({"x": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}}).encode()
    content = struct.pack("<Q", len(header)) + header + b"12"
    (folder() / "model.safetensors").write_bytes(content)
    return [], ["model.safetensors"]


def _config_that_is_not_json(folder):
    (folder() / "config.json").write_text('{"model_type": ')
    return [], ["config.json"]


def _context_longer_than_the_models(folder):
    folder()
    return ["--load-format", "dummy", "--max-model-len", "129"], ["129", "128"]


UNLOADABLE = [
    _unknown_architecture,
    _no_weights,
    _half_downloaded,
    _truncated_weights,
    _config_that_is_not_json,
    _context_longer_than_the_models,
]


@pytest.mark.parametrize("broken", UNLOADABLE)
def test_what_cannot_be_loaded_is_told_in_a_line_or_two(folder, tmp_path, broken):
    """By the function that the engine process calls to load the model."""
    flags, words = broken(folder)
    args = build_parser().parse_args(["serve", str(tmp_path / "model"), *flags])
    with pytest.raises(KilnError) as raised:
        load_runner(engine_config(args, tmp_path / "model"), None)
    _told(f"error: {raised.value}", *words)


@pytest.mark.quick(1)
@pytest.mark.parametrize("broken", UNLOADABLE)
def test_serve_ends_with_what_the_engine_process_tells(kiln, folder, tmp_path, broken):
    flags, words = broken(folder)
    _failed(kiln("serve", tmp_path / "model", "--port", 0, *flags), 1, *words)


def test_a_broken_tokenizer(kiln, folder, monkeypatch):
    """Which the server reads itself; here no engine is loaded beside it."""
    monkeypatch.setattr(child, "module_command", lambda module: ["true"])
    path = folder()
    (path / "tokenizer.json").write_text("{")
    result = kiln("serve", path, "--port", 0, "--load-format", "dummy")
    _failed(result, 1, "tokenizer.json")


def test_a_port_in_use_is_found_before_the_model_loads(kiln, folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = kiln("serve", folder(), "--port", port, "--load-format", "dummy")
    _failed(result, 1, str(port), "--port")
    assert "…" not in result.stderr, "nothing was loaded"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--block-size", 0), ["block_size", "0"]),
        (("--num-kv-blocks", -1), ["num_blocks", "-1"]),
        (("--gpu-memory-utilization", 1.5), ["gpu_memory_utilization", "1.5"]),
        (("--kv-memory-gib", 0), ["kv_memory_gib", "0"]),
        (("--max-model-len", 1), ["max_model_len", "1"]),
        (("--max-num-seqs", 0), ["max_num_seqs", "0"]),
        (("--device", "tpu"), ["device", "'tpu'"]),
        (("--port", 65536), ["port", "65536"]),
        (("--host", "no.such.host.invalid"), ["no.such.host.invalid"]),
        (("--host", "0.0.0.0"), ["--api-key", "--allow-unauthenticated"]),
        (("--host", "::"), ["--api-key"]),
        (("--shutdown-timeout", -1), ["--shutdown-timeout", "-1"]),
        (("--shutdown-timeout", "nan"), ["--shutdown-timeout", "nan"]),
        (("--timeout-keep-alive", -1), ["--timeout-keep-alive", "-1"]),
        (("--max-restarts", -1), ["--max-restarts", "-1"]),
        (
            (
                "--api-key",
                "",
            ),
            ["API key is empty"],
        ),
        (("--api-key", "a", "--api-key-file", "b"), ["--api-key and --api-key-file"]),
        (("--enable-lora",), ["--lora-modules", "--lora-root"]),
        (("--lora-modules", '{"name": "a"}'), ["--lora-modules", "NAME=PATH"]),
        (("--api-key-file", "/no/such/key"), ["/no/such/key"]),
    ],
)
def test_a_value_out_of_range(kiln, folder, flags, words):
    flags = flags if "--port" in flags else (*flags, "--port", 0)
    _failed(kiln("serve", folder(), "--load-format", "dummy", *flags), 1, *words)


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--no-such-flag"],
        ["serve", "--port", "http"],
        ["serve", "--dtype", "int3"],
        ["bake"],
        ["bench"],
    ],
)
def test_wrong_usage_is_code_2(kiln, arguments):
    result = kiln(*arguments)
    assert result.returncode == 2
    assert "error: " in result.stderr
    assert "Traceback" not in result.stderr


def test_the_code_is_that_of_the_process(kiln_process):
    _failed(kiln_process("serve", "/no/such/model", "--port", 0), 1, "/no/such/model")
    assert kiln_process("serve", "--no-such-flag").returncode == 2


@pytest.mark.parametrize("command", [["version"], ["env"], ["serve"], ["chat"], ["doctor"]])
def test_an_unknown_toggle_stops_every_command(kiln, command):
    result = kiln(*command, KILN_NORN="jit")
    _failed(result, 2, "KILN_NORN", "did you mean KILN_NORM?")
    assert result.stdout == ""


def test_a_bad_value_of_a_toggle_names_the_choices(kiln):
    _failed(kiln("version", KILN_NORM="cuda"), 2, "KILN_NORM='cuda'", "auto, jit, triton, torch")


def test_debug_shows_where_an_error_comes_from(kiln_process):
    result = kiln_process("serve", "/no/such/model", "--debug")
    assert result.returncode == 1
    assert "Traceback" in result.stderr


def test_a_server_that_is_not_there(kiln):
    _failed(kiln("chat", "--url", "http://127.0.0.1:9"), 1, "cannot reach http://127.0.0.1:9")
