"""Run ``kiln`` as a user does."""

import json
import os
import subprocess

import pytest

from kiln.engine.distributed.command import module_command

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


@pytest.fixture(scope="session")
def kiln():
    """Run a command line; return what is left of it when it ended."""

    def run(*arguments, stdin="", timeout=60, **environment):
        command = [*module_command("kiln.engine.cli.main"), *map(str, arguments)]
        return subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100", **environment},
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
