"""Run ``kiln`` in this process, or as a user does."""

import io
import json
import logging
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest

from kiln.engine.cli.main import main
from kiln.engine.distributed.command import module_command
from kiln.jit_kernels.declare.settings import settings

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "vocab_size": 400,
    "eos_token_id": 2,
}
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "COLUMNS": "100"}


@contextmanager
def unchanged_logging():
    """Undo what a command does to the logging of this process."""
    root, own = logging.getLogger(), logging.getLogger("kiln")
    handlers, levels = root.handlers[:], (root.level, own.level)
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(levels[0])
        own.setLevel(levels[1])


@pytest.fixture
def kiln(capsys):
    """Run a command line in this process, which has imported torch already; return its outcome.

    Engines that the command starts still run in their own processes.
    """

    def run(*arguments, stdin="", **environment):
        capsys.readouterr()
        with unchanged_logging(), pytest.MonkeyPatch.context() as patch:
            for name, value in {**ENVIRONMENT, **environment}.items():
                patch.setenv(name, value)
            patch.setattr(sys, "stdin", io.StringIO(stdin))
            settings.cache_clear()
            try:
                code = main([*map(str, arguments)])
            except SystemExit as end:  # argparse's
                code = end.code
        settings.cache_clear()
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def kiln_process():
    """Run a command line in a process; return what is left of it when it ended."""

    def run(*arguments, stdin="", timeout=60, **environment):
        command = [*module_command("kiln.engine.cli.main"), *map(str, arguments)]
        return subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, **ENVIRONMENT, **environment},
        )

    return run


@pytest.fixture
def folder(tmp_path):
    """Make a model folder out of a changed config; its weights are dummies."""

    def make(**changes):
        path = tmp_path / "model"
        path.mkdir(exist_ok=True)
        config = {k: v for k, v in {**CONFIG, **changes}.items() if v is not None}
        (path / "config.json").write_text(json.dumps(config))
        return path

    return make
