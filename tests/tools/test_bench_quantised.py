"""The forms that bench_quantised.py measures are ones that Kiln reads."""

from __future__ import annotations

import bench_quantised
import pytest

from kiln.engine.bench.shapes import write_shape
from kiln.engine.models.registry import read_model


@pytest.mark.parametrize("form", bench_quantised.FORMS)
def test_a_form_is_a_shape_whose_weights_take_fewer_bytes(tmp_path, form):
    suffix, quantization = bench_quantised.FORMS[form]
    config = read_model(write_shape(bench_quantised.SHAPE + suffix, tmp_path), quantization)[1]
    assert (config.quantization.bits == 0) == (form == "bf16")
    assert config.quantization.bits <= 8
