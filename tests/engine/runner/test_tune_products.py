"""What ``kiln warmup --tune`` measures, and the limits that it draws from times."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from packers.packer import all_packers
from some_gpu import GPU
from tiny.model import all_tiny

from kiln.engine.errors import ConfigError
from kiln.engine.layers import few_rows, row_limits
from kiln.engine.models import products
from kiln.engine.models.dummy_weights import DummyWeights
from kiln.engine.models.loader import load_model
from kiln.engine.models.products import products_of
from kiln.engine.models.registry import read_model
from kiln.engine.models.split import Split
from kiln.engine.runner import tune_products as tuner
from kiln.engine.runner.tune_products import Times, best_limit, tune_products

CPU, BF16 = torch.device("cpu"), torch.bfloat16


@pytest.mark.parametrize(
    ("kernel", "limit"),
    [
        ([5, 5, 5, 5], 16),
        ([9, 9, 9, 9], 0),
        ([7, 7, 7, 7], 0),  # as fast as torch's
        ([5, 5, 9, 9], 4),
        ([5, 8, 5, 5], 16),  # one slower number of rows among faster ones
        ([9, 5, 5, 9], 8),  # worth a slower one below
        ([9, 6, 7, 9], 0),  # not worth it
        ([8, 9, 9, 3], 0),
        ([8, 9, 9, 1], 16),
    ],
)
def test_the_limit_has_the_least_sum_of_times(kernel, limit):
    times = [Times(rows, us, 7) for rows, us in zip((2, 4, 8, 16), kernel, strict=True)]
    assert best_limit(times) == limit


class Timer:
    """Gives times without measuring: the kernel is faster up to ``limit`` rows. Runs all calls."""

    def __init__(self, monkeypatch, limit):
        self.limit, self.rows = limit, []
        self.kernel_rows = []
        operator = few_rows.multiply_few

        def counting(form, x, *arguments):
            done = operator(form, x, *arguments)
            if done:
                self.kernel_rows.append(len(x))
            return done

        for module in ("weight", "channel_weight", "block_weight"):
            monkeypatch.setattr(f"kiln.engine.layers.{module}.multiply_few", counting)

    def __call__(self, choices):
        self.kernel_rows.clear()
        for call in choices["kernel"]:
            call()
        (rows,) = set(self.kernel_rows)
        assert len(self.kernel_rows) == len(choices["kernel"])
        for call in choices["torch"]:
            call()
        assert len(self.kernel_rows) == len(choices["kernel"]), "torch multiplies"
        self.rows.append(rows)
        return {"kernel": 5.0 if rows <= self.limit else 9.0, "torch": 7.0}


def model_of(tmp_path, packer=None, **more):
    all_tiny()["qwen3"].save(tmp_path, hidden_size=256, intermediate_size=512, **more)
    if packer is not None:
        path = tmp_path / "config.json"
        config = json.loads(path.read_text())
        quantised = dict(all_packers()[packer].config)
        path.write_text(json.dumps({**config, "quantization_config": quantised}))
    return read_model(tmp_path)


def tune(model, timer, world=1, dtype=BF16):
    return tune_products(model, dtype, CPU, world, timer, lambda *told: None)


def test_the_products_of_a_model_are_measured_and_kept(tmp_path, environment, monkeypatch, use_gpu):
    environment(KILN_CPU_KERNELS="host")
    model, timer = model_of(tmp_path, tie_word_embeddings=True), Timer(monkeypatch, 6)
    told = []
    found = tune_products(model, BF16, CPU, 1, timer, lambda *one: told.append(one))
    config = model[1]
    sizes = {one.roles: (one.product.outputs, one.product.inputs) for one in found}
    heads = config.num_heads * config.head_dim
    kv = 2 * config.num_kv_heads * config.head_dim
    assert sizes == {
        ("qkv_proj",): (heads + kv, 256),
        ("o_proj",): (256, heads),
        ("gate_up_proj",): (1024, 256),
        ("down_proj",): (256, 512),
        ("lm_head",): (config.vocab_size, 256),
    }
    assert {(one.product.form, one.product.dtype) for one in found} == {("DenseWeight", "bfloat16")}
    assert timer.rows == [*tuner.ROWS] * len(found)
    assert tuner.ROWS[-1] == 16
    assert {one.most_rows for one in found} == {6}
    assert told[-1] == ("products", len(found), len(found))
    use_gpu("NVIDIA A100")
    path = tuner.store(GPU, found)
    assert str(path) in row_limits.limits_on(GPU).source
    assert all(row_limits.limits_on(GPU).most_rows(one.product, 1) == 6 for one in found)


def test_a_rank_has_its_own_sizes(tmp_path, environment, monkeypatch):
    environment(KILN_CPU_KERNELS="host")
    model = model_of(tmp_path)
    whole, half = (tune(model, Timer(monkeypatch, 16), world) for world in (1, 2))
    both = {one.roles: one.product for one in whole}
    for one in half:
        mine, all_of_it = one.product, both[one.roles]
        by_inputs = one.roles in (("o_proj",), ("down_proj",))
        assert mine.outputs == all_of_it.outputs // (1 if by_inputs else 2)
        assert mine.inputs == all_of_it.inputs // (2 if by_inputs else 1)
    with pytest.raises(ConfigError, match="tensor_parallel_size=3"):
        tune(model, Timer(monkeypatch, 16), 3)


@pytest.mark.parametrize(
    ("name", "form", "stored"),
    [
        ("fp8-blocks", "BlockGroupWeight", "float8_e4m3fn"),
        ("fp8-static", "StaticWeight", "float8_e4m3fn"),
        ("ct-float-quantized-float-channel-token", "TokenWeight", "float8_e4m3fn"),
        ("ct-int-quantized-int-channel-token", "TokenWeight", "int8"),
    ],
)
def test_quantised_projections_are_measured_in_their_form(
    tmp_path, environment, monkeypatch, name, form, stored
):
    environment(KILN_CPU_KERNELS="host")
    model = model_of(tmp_path, name, tie_word_embeddings=True)
    found = tune(model, Timer(monkeypatch, 16))
    forms = {one.roles[0]: (one.product.form, one.product.stored) for one in found}
    assert forms.pop("lm_head") == ("DenseWeight", "bfloat16")
    assert set(forms.values()) == {(form, stored)}


@pytest.mark.parametrize("name", [None, *sorted(all_packers())])
def test_the_listed_products_are_those_of_the_loaded_model(tmp_path, name):
    family, config = model_of(tmp_path, name)
    listed = products_of(family, config, BF16, Split())
    mine = {
        (weight.form, *(None if one is None else one.shape for one in weight.tensors))
        for one in listed
        for weight in one.weights(config, BF16, CPU)
    }
    seen = set()

    class Seen:
        def linear(self, projection, layer):
            for one in getattr(layer.weight, "parts", (layer.weight,)):
                shapes = (None if tensor is None else tensor.shape for tensor in one.tensors)
                seen.add((one.form, *shapes))
            return layer

        def embedding(self, name, vocabulary, layer):
            return layer

    load_model(family, config, DummyWeights(0, BF16), 1, BF16, CPU, wrapper=Seen())
    assert mine == seen
    assert len(listed) <= len(mine) + 1


def test_equal_products_of_several_roles_are_measured_once(tmp_path, environment, monkeypatch):
    environment(KILN_CPU_KERNELS="host")
    family, config = model_of(tmp_path, tie_word_embeddings=False)
    config = dataclasses.replace(config, vocab_size=1024)  # as many outputs as gate and up
    found = tune((family, config), Timer(monkeypatch, 16))
    assert ("gate_up_proj", "lm_head") in [one.roles for one in found]
    tied = dataclasses.replace(config, tie_word_embeddings=True)
    again = tune((family, tied), Timer(monkeypatch, 16))
    assert [one.roles for one in again] == [one.roles for one in found]


def test_what_cannot_be_measured_is_refused(tmp_path, environment, monkeypatch):
    model, timer = model_of(tmp_path), Timer(monkeypatch, 16)
    environment()
    with pytest.raises(ConfigError, match=r"skinny_gemm cannot run.*KILN_CPU_KERNELS=torch"):
        tune(model, timer)
    environment(KILN_CPU_KERNELS="host")
    with pytest.raises(ConfigError, match="skinny_gemm cannot run, so torch multiplies"):
        tune(model, timer, dtype=torch.float32)
    for toggle in ("jit", "torch"):
        environment(KILN_CPU_KERNELS="host", KILN_LINEAR=toggle)
        with pytest.raises(ConfigError, match=f"KILN_LINEAR={toggle} decides for all products"):
            tune(model, timer)
    assert not timer.rows


def test_a_model_without_any_such_product_is_told(tmp_path, environment, monkeypatch):
    environment(KILN_CPU_KERNELS="host")
    monkeypatch.setattr(few_rows, "why_not", lambda arguments, is_gated: "no such codes")
    with pytest.raises(ConfigError, match="no product of this model in bfloat16"):
        tune(model_of(tmp_path), Timer(monkeypatch, 16))


def test_wrong_products_are_not_measured(tmp_path, environment, monkeypatch):
    environment(KILN_CPU_KERNELS="host")
    timer, weights = Timer(monkeypatch, 16), products.ModelProduct.weights

    def wrong(self, *arguments):
        made = weights(self, *arguments)
        product = type(made[0]).product

        def off(weight, x, out, bias):
            product(weight, x, out, bias)
            if few_rows._trials[-1].most_rows:
                out[3] *= 1.1

        monkeypatch.setattr(type(made[0]), "product", off)
        monkeypatch.setattr(products.ModelProduct, "weights", weights)
        return made

    monkeypatch.setattr(products.ModelProduct, "weights", wrong)
    with pytest.raises(ConfigError, match=r"wrong products of .*differ from torch's by 0\.1"):
        tune(model_of(tmp_path), timer)
    assert not timer.rows
