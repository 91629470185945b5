"""The runner: log-probabilities of transformers, sharded and dummy weights, refusals in words."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from kiln.engine.config import EngineConfig, KVConfig, ModelConfig
from kiln.engine.errors import ConfigError, ModelError
from kiln.engine.requests.batch import Batch, ScheduledRequest
from kiln.engine.requests.pooling import HiddenPart
from kiln.engine.requests.sampling_params import SamplingParams
from kiln.engine.runner import loaded_model, model_runner
from kiln.engine.runner.executor import Executor
from kiln.engine.runner.model_runner import ModelRunner

SIZES = {
    "vocab_size": 20,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
FAMILIES = {
    "Llama": {"hidden_act": "gelu", "rms_norm_eps": 0.01},
    "Mistral": {"head_dim": 10, "sliding_window": 6},
    "Qwen2": {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
    "Qwen3": {"head_dim": 16},
}


def save(folder, family, **save_options):
    config = getattr(transformers, f"{family}Config")(**SIZES, **FAMILIES[family])
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.3)
    model.save_pretrained(folder, **save_options)
    return model


def runner(folder, progress=None, kv=None, **settings):
    kv = kv or KVConfig(block_size=3, num_blocks=50)
    model = ModelConfig(str(folder), **{"device": "cpu", **settings})
    return ModelRunner(EngineConfig(model, kv), progress)


def run(made, tokens, before=0, **params):
    settings = SamplingParams(**{"temperature": 0, "logprobs": 20, **params})
    blocks = list(range(40, 20, -1))
    row = ScheduledRequest("r", 0, len(tokens), before, tokens, 0, blocks, True, 0, settings, 0)
    return made.run(Batch((row,))).tokens[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_are_those_of_transformers(tmp_path, family):
    model, tokens = save(tmp_path, family), torch.randint(0, 20, (11,)).tolist()
    made = runner(tmp_path)
    run(made, tokens[:4])
    top = run(made, tokens[4:], before=4).logprobs[0].top
    with torch.inference_mode():
        wanted = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
    found = torch.tensor([logprob for _, logprob, _ in sorted(top)])
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_are_close_to_float32(tmp_path, dtype):
    save(tmp_path, "Qwen3")
    tokens = list(range(15))
    exact, rounded = runner(tmp_path), runner(tmp_path, dtype=dtype)
    assert rounded.loaded.dtype == getattr(torch, dtype)
    run(rounded, tokens[:7])
    pairs = zip(
        sorted(run(exact, tokens).logprobs[0].top),
        sorted(run(rounded, tokens[7:], before=7).logprobs[0].top),
        strict=True,
    )
    assert max(abs(a[1] - b[1]) for a, b in pairs) < 0.5


def test_shards_and_one_file_give_the_same_tokens(tmp_path):
    torch.manual_seed(0)
    save(tmp_path / "one", "Llama")
    torch.manual_seed(0)
    save(tmp_path / "many", "Llama", max_shard_size="10KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    one, many = runner(tmp_path / "one"), runner(tmp_path / "many")
    assert run(one, [1, 2, 3]) == run(many, [1, 2, 3])


def test_dummy_weights_need_no_more_than_a_config(tmp_path):
    config = {"architectures": ["Qwen3ForCausalLM"], **SIZES}
    (tmp_path / "config.json").write_text(json.dumps(config))
    first, again = (runner(tmp_path, load_format="dummy") for _ in range(2))
    other = runner(tmp_path, load_format="dummy", seed=1)  # of requests, not of weights
    assert run(first, [1, 2]) == run(again, [1, 2]) == run(other, [1, 2])
    with pytest.raises(ModelError, match="no weights found"):
        runner(tmp_path)


def test_a_step_without_a_last_token_draws_nothing(tmp_path):
    save(tmp_path, "Llama")
    row = ScheduledRequest("r", 0, 2, 0, [1, 2], 0, [0], False, 0, SamplingParams(), 0)
    assert runner(tmp_path).run(Batch((row,))).tokens == ()


def test_nan_weights_are_an_error_of_the_row_not_of_the_step(tmp_path):
    model = save(tmp_path, "Llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[3] = float("nan")
    model.save_pretrained(tmp_path)
    made = runner(tmp_path)
    rows = tuple(
        ScheduledRequest(str(t), b, 1, 0, [t], 0, [b], True, 0, SamplingParams(temperature=0), 0)
        for b, t in enumerate((1, 3, 4))
    )
    assert [bool(token.error) for token in made.run(Batch(rows)).tokens] == [False, True, False]


def test_sums_of_hidden_states_are_those_of_transformers(tmp_path):
    """In chunks, beside a request that wants none."""
    model, tokens = save(tmp_path, "Llama"), [3, 1, 4, 1, 5, 9, 2, 6]
    with torch.no_grad():
        wanted = model.model(torch.tensor([tokens])).last_hidden_state[0]
    made, settings = runner(tmp_path), SamplingParams(temperature=0)
    other = ScheduledRequest("other", 1, 3, 0, [7, 8, 9], 0, [9], 1, 0, settings, 0)
    first = ScheduledRequest("r", 0, 5, 0, tokens[:5], 0, [1, 2], 0, 0, settings, 0)
    rest = ScheduledRequest("r", 0, 3, 5, tokens[5:], 2, [3], 1, 0, settings, 0)
    sampled, chunk = made.run(Batch((other, first._replace(hidden=HiddenPart(1, 4))))).tokens
    assert (sampled.hidden, len(sampled.token_ids)) == (None, 1)
    assert (chunk.request_id, chunk.token_ids) == ("r", [])
    torch.testing.assert_close(chunk.hidden, wanted[1:5].sum(0), atol=1e-4, rtol=1e-4)
    (last,) = made.run(Batch((rest._replace(hidden=HiddenPart(2, 1)),))).tokens
    assert len(last.token_ids) == 1
    torch.testing.assert_close(last.hidden, wanted[7], atol=1e-4, rtol=1e-4)


def test_a_first_step_that_fails_is_a_model_error(tmp_path):
    model = save(tmp_path, "Llama")
    heard = []
    runner(tmp_path).try_out(lambda *call: heard.append(call))
    assert heard == [("first step", 0, 1), ("first step", 1, 1)]
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = float("nan")
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="first step failed: the model's logits contain NaN"):
        runner(tmp_path).try_out()


def test_a_first_step_without_memory_names_the_settings(tmp_path, monkeypatch, caplog):
    save(tmp_path, "Llama")
    made = runner(tmp_path)

    def no_memory(*_):
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr(made.loaded.model, "forward", no_memory)
    with pytest.raises(ModelError, match=r"first step failed: cpu ran out.*max_num_batched_tokens"):
        made.try_out()
    monkeypatch.setattr(made.loaded.model, "forward", lambda *_: [][0])
    with pytest.raises(ModelError, match=r"first step failed: IndexError"):
        made.try_out()
    assert "in forward" in caplog.text or "<lambda>" in caplog.text  # the place is logged


def test_loading_without_memory_names_the_settings(tmp_path, monkeypatch):
    save(tmp_path, "Llama")

    def no_memory(*_):
        raise torch.OutOfMemoryError("tried to allocate 200 GiB")

    monkeypatch.setattr(loaded_model, "load_model", no_memory)
    with pytest.raises(ConfigError, match=r"in loading the model: lower max_num_batched_tokens"):
        runner(tmp_path)


def test_the_memory_of_the_largest_step_is_measured_in_a_pool_of_one_block(tmp_path, monkeypatch):
    save(tmp_path, "Llama")
    made = runner(tmp_path)
    monkeypatch.setattr(model_runner, "_CPU_TRIAL_TOKENS", 10**9)  # as on a GPU
    held, order = [100, 700], []
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: held[0])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: held[1])
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda device: order.append("measure")
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append("done"))
    works = Executor.launch

    def launch(self, batch):
        blocks = len(self.step.inputs._token_pool) // 3
        order.append((batch.num_tokens, len(batch.requests), blocks))
        return works(self, batch)

    monkeypatch.setattr(Executor, "launch", launch)
    assert made._step_bytes() == 600
    assert order == ["measure", (2048, 64, 1), "done"]


def test_loading_reports_the_bytes_of_every_layer(tmp_path):
    save(tmp_path, "Llama")
    heard = []
    runner(tmp_path, progress=lambda *call: heard.append(call))
    size = (tmp_path / "model.safetensors").stat().st_size
    assert {(stage, total) for stage, _, total in heard} == {("weights", size)}
    start, first, second, end = (done for _, done, _ in heard)
    assert 0 == start < first < second < end == size


def test_random_weights_report_every_layer(tmp_path):
    save(tmp_path, "Llama")
    heard = []
    runner(tmp_path, lambda *call: heard.append(call), load_format="dummy")
    assert heard == [("random weights", layers, 2) for layers in range(3)]


def test_the_limits_come_from_the_model_and_the_flags(tmp_path):
    save(tmp_path, "Llama")
    made = runner(tmp_path)
    assert (made.max_model_len, made.num_blocks, made.vocab_size) == (64, 50, 20)
    assert (made.device, made.loaded.dtype) == (torch.device("cpu"), torch.float32)
    assert runner(tmp_path, max_model_len=30).max_model_len == 30


def test_auto_is_float32_on_a_cpu_whatever_the_checkpoint(tmp_path):
    model = save(tmp_path, "Llama")
    model.bfloat16().save_pretrained(tmp_path)
    made = runner(tmp_path)
    assert made.loaded.hf.dtype == torch.bfloat16
    assert made.loaded.dtype == torch.float32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 65}, "max_model_len=65: the model reaches 64 tokens"),
        ({"device": "cuda"}, "sees no CUDA device"),
        ({"kv": KVConfig(block_size=3, num_blocks=4)}, "set max_model_len to 12 or less"),
        ({"kv": KVConfig(num_blocks=2**40)}, "does not fit in memory"),
    ],
    ids=["too-long", "no-gpu", "small-pool", "huge-pool"],
)
def test_what_cannot_be_served_is_a_config_error(tmp_path, monkeypatch, settings, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    save(tmp_path, "Llama")
    with pytest.raises(ConfigError, match=message):
        runner(tmp_path, **settings)
