"""Up to how many rows the kernel multiplies on a GPU: the built-in table, and tuned ones."""

from __future__ import annotations

import json

import pytest
import torch
from some_gpu import GPU, measured
from torch._subclasses import FakeTensorMode

from kiln.engine.errors import ConfigError
from kiln.engine.layers import (
    block_weight,
    channel_weight,
    few_rows,
    group_weight,
    mxfp4_weight,
    row_limits,
)
from kiln.engine.layers.linear import Linear
from kiln.engine.layers.row_limits import Product, limits_on
from kiln.engine.layers.weight import FORMS, DenseWeight

H100, H200, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA A100-SXM4-80GB"
MIB = 2**20
NEEDS = {"scalar_t": "kiln::bf16"}


def most_rows(form="DenseWeight", num_bytes=MIB, outputs=64, stored="bfloat16"):
    product = Product(form, "bfloat16", outputs, 256, stored)
    return limits_on(GPU).most_rows(product, num_bytes)


@pytest.mark.parametrize("name", [H100, "NVIDIA H100 PCIe", H200, "NVIDIA H200 NVL", "GH200 480GB"])
def test_the_built_in_table_is_that_of_these_gpus(use_gpu, name):
    use_gpu(name)
    assert (most_rows(num_bytes=40 * MIB), most_rows(num_bytes=40 * MIB + 1)) == (16, 8)
    block = "BlockGroupWeight"
    assert (most_rows(block, 20 * MIB), most_rows(block, 20 * MIB + 1)) == (16, 8)
    assert most_rows("TokenWeight", 2**40) == 8
    assert most_rows("TokenWeight", 2**40, stored="int8") == 16
    assert most_rows("ChannelWeight", 2**40) == 16
    assert most_rows("AFormThatWasNotMeasured") == 0
    assert most_rows("AFormThatWasNotMeasured", stored="int8") == 0
    assert few_rows.limits_source(GPU) == "the built-in table of H100 and H200"


def test_forms_of_the_built_in_table_exist():
    for module in (block_weight, channel_weight, group_weight, mxfp4_weight):
        assert {form.__module__ for form in FORMS.values()} >= {module.__name__}
    assert set(row_limits.BUILT_IN) <= set(FORMS)
    for steps in row_limits.BUILT_IN.values():
        assert [most for most, _ in steps] == sorted(most for most, _ in steps)


@pytest.mark.parametrize("name", [A100, "NVIDIA H20", "NVIDIA GeForce RTX 4090", "NVIDIA B200"])
def test_torch_multiplies_on_other_gpus(use_gpu, environment, name):
    use_gpu(name)
    environment()
    assert most_rows() == 0
    assert not few_rows.few_row_kernels(GPU, NEEDS)
    assert "kiln warmup --tune" in few_rows.limits_source(GPU)
    assert few_rows.few_row_kernels(torch.device("cuda"), NEEDS), "for GPUs of other machines"


def test_a_tuned_limit_wins_over_the_built_in_one(use_gpu, environment):
    use_gpu(H100)
    environment()
    path = row_limits.store(GPU, [measured(rows=5), measured("TokenWeight", rows=0)])
    assert (most_rows(), most_rows("TokenWeight")) == (5, 0)
    assert most_rows(outputs=65) == 16, "another product"
    source = few_rows.limits_source(GPU)
    assert str(path) in source
    assert json.loads(path.read_text())["date"] in source
    assert source.endswith("the others by the built-in table of H100 and H200")


def test_a_tuned_limit_is_that_of_one_dtype_of_codes(use_gpu, environment):
    use_gpu(H100)
    environment()
    tuned = {"int8": 3, "float8_e4m3fn": 9}
    for stored, rows in tuned.items():
        row_limits.store(GPU, [measured("TokenWeight", rows=rows, stored=stored)])
    assert {one: most_rows("TokenWeight", stored=one) for one in tuned} == tuned
    with FakeTensorMode():
        for stored, rows in tuned.items():
            codes = torch.empty(64, 256, dtype=getattr(torch, stored), device=GPU)
            assert few_rows.multiplies_few("TokenWeight", codes, torch.bfloat16, rows)
            assert not few_rows.multiplies_few("TokenWeight", codes, torch.bfloat16, rows + 1)


def test_products_ask_the_tuned_table_and_toggles_win_over_it(use_gpu, environment):
    use_gpu(A100, (8, 0), 108)
    row_limits.store(GPU, [measured(rows=5)])
    with FakeTensorMode():
        known, other = (torch.empty(n, 256, dtype=torch.bfloat16, device=GPU) for n in (64, 65))

    def takes(weight, rows):
        return few_rows.multiplies_few("DenseWeight", weight, torch.bfloat16, rows)

    def is_opaque(weight):
        return Linear.of(DenseWeight(weight), None, torch.bfloat16).is_opaque

    environment()
    assert [takes(known, rows) for rows in (0, 1, 5, 6, 16)] == [False, True, True, False, False]
    assert not takes(other, 1)
    assert (is_opaque(known), is_opaque(other)) == (True, False)
    assert few_rows.few_row_kernels(GPU, NEEDS)
    text = few_rows.describe_product("DenseWeight", known, "torch")
    assert text == "up to 5 rows by skinny_gemm, more: torch"
    assert few_rows.describe_product("DenseWeight", other, "torch") == "torch"
    environment(KILN_LINEAR="jit")
    assert takes(known, 16)
    assert takes(other, 16)
    assert not takes(other, 17)
    assert few_rows.limits_source(GPU) == "KILN_LINEAR=jit"
    environment(KILN_LINEAR="torch")
    assert not takes(known, 1)
    assert not few_rows.few_row_kernels(GPU, NEEDS)


def test_a_table_in_which_torch_always_wins_loads_no_kernel(use_gpu, environment):
    use_gpu(A100)
    environment()
    row_limits.store(GPU, [measured(rows=0)])
    assert not few_rows.few_row_kernels(GPU, NEEDS)


def test_another_model_adds_its_products(use_gpu):
    use_gpu(A100)
    row_limits.store(GPU, [measured(rows=5), measured("TokenWeight", rows=6)])
    row_limits.store(GPU, [measured(rows=7, us=[1.0]), measured("BlockWeight", rows=8)])
    found = {form: most_rows(form) for form in ("DenseWeight", "TokenWeight", "BlockWeight")}
    assert found == {"DenseWeight": 7, "TokenWeight": 6, "BlockWeight": 8}


def test_a_table_of_other_hardware_is_not_used(use_gpu, caplog):
    use_gpu(A100, (8, 0), 108)
    path = row_limits.store(GPU, [measured()])
    for other in (("NVIDIA A100-PCIE-40GB", (8, 0), 108), (A100, (8, 0), 54), (A100, (8, 6), 108)):
        use_gpu(*other)
        assert most_rows() == 0
        assert not caplog.records, "it is another file"
        copied = row_limits._path(row_limits.key_of(GPU))
        copied.write_bytes(path.read_bytes())
        use_gpu(*other)
        assert most_rows() == 0
        assert str(copied) in caplog.text
        caplog.clear()


@pytest.mark.parametrize("field", ["torch", "cuda", "kiln", "source"])
def test_a_table_of_other_software_is_reported_and_replaced(
    use_gpu, monkeypatch, caplog, field
):  # fmt: skip
    use_gpu(H100)
    path = row_limits.store(GPU, [measured(rows=5), measured("TokenWeight", rows=6)])
    key_of = row_limits.key_of
    monkeypatch.setattr(row_limits, "key_of", lambda device: {**key_of(device), field: "other"})
    limits_on.cache_clear()
    assert most_rows() == 16, "the built-in one"
    assert f"the table of kiln warmup --tune {path} is not used: it was measured on" in caplog.text
    assert row_limits.store(GPU, [measured(rows=4)]) == path
    assert (most_rows(), most_rows("TokenWeight")) == (4, 16), "what is old is gone"


@pytest.mark.parametrize(
    "damage",
    [
        *(lambda text: text[:-9], lambda text: "[]", lambda text: "{}", lambda text: "\x00"),
        lambda text: text.replace('"most_rows": 12', '"most_rows": 17'),
        lambda text: text.replace('"most_rows": 12', '"most_rows": -1'),
        lambda text: text.replace('"most_rows": 12', '"most_rows": true'),
        lambda text: text.replace('"most_rows": 12', '"most_rows": "12"'),
        lambda text: text.replace('"outputs"', '"rows"'),
        lambda text: text.replace('"stored"', '"kept"'),
        lambda text: text.replace('"date": "2', '"date": "x'),
        lambda text: text.replace('"products": [', '"products": [1, '),
    ],
)
def test_a_damaged_table_is_reported_and_not_used(use_gpu, caplog, damage):
    use_gpu(A100)
    path = row_limits.store(GPU, [measured(rows=12)])
    assert most_rows() == 12
    text = path.read_text()
    assert damage(text) != text
    path.write_text(damage(text))
    limits_on.cache_clear()
    assert most_rows() == 0
    assert str(path) in caplog.text


def test_without_a_folder_nothing_is_kept(use_gpu, monkeypatch):
    use_gpu(H100)
    monkeypatch.setattr(row_limits, "_path", lambda key: None)
    assert most_rows() == 16
    with pytest.raises(ConfigError, match="KILN_KERNEL_CACHE_DIR or HOME"):
        row_limits.store(GPU, [measured()])


def test_a_model_of_8_bit_floats_loads_the_kernel_too(use_gpu, environment):
    use_gpu(H100)
    environment()
    needs = {**NEEDS, "weight": ["Plain", "E4M3"], "scaled": ["kNone", "kByOutput"]}
    assert few_rows.few_row_kernels(GPU, needs)
    assert not few_rows.few_row_kernels(GPU, {**needs, "scalar_t": "float"})
