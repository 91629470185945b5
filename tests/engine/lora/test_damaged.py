"""Damaged adapters are load errors that name the adapter; nothing else comes of them."""

from __future__ import annotations

import json
import random
import shutil

import pytest
import torch
from adapter_pools import pool_of
from depth import at_depth
from safetensors.torch import load_file, save_file

from kiln import LLM
from kiln.engine.errors import AdapterError, ModelError
from kiln.engine.lora.adapter import read_adapter
from kiln.engine.lora.batch_info import make_batch_info
from kiln.engine.lora.sites import Kind
from kiln.engine.lora.torch_native import TorchNativeLoRA

COUNT = at_depth(250, 1000)
CPU = torch.device("cpu")
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
VALUES = [
    None, True, False, 0, 1, -1, 7, 2**63, 10**30, 0.5, float("inf"), float("nan"), "", "none",
    "all-linear", "LORA", "(", ".*", "x" * 1000, [], [0], ["q_proj"], [None], [[1]], {}, {"r": 1},
    {"(": 1}, {"q_proj": None}, {"q_proj": 2}, {".*": 10**30},
]  # fmt: skip


def flip(draw, data):
    """Flip a few bits, half of the time in the first bytes, which say how long the header is."""
    data = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(draw.choice((min(9, len(data)), len(data))))
        data[place] ^= 1 << draw.randrange(8)
    return bytes(data)


def cut(draw, data):
    return data[: draw.randrange(len(data))]


def lengthen(draw, data):
    return data + draw.randbytes(draw.randint(1, 64))


def replace(draw, data):
    return draw.choice((b"", b"{}", b"\x00" * 64, b"\xff" * 64, b"[" * 50_000, draw.randbytes(256)))


def edit_header(draw, data):
    """Change one value of the header of a safetensors file, and keep the length right."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    name = draw.choice([name for name in header if name != "__metadata__"])
    entry = header[name]
    change = draw.randrange(4)
    if change == 0:
        entry["dtype"] = draw.choice(("F64", "F16", "I32", "F8_E4M3", "BOOL", "X", None))
    elif change == 1:
        entry["shape"] = draw.choice(([], [0], [-1, 4], entry["shape"][::-1], [2**62, 8], ["4"]))
    elif change == 2:
        entry["data_offsets"] = draw.choice(([0, 0], [8, 4], [0, 2**60], [-8, 8], [0], None))
    else:
        header[draw.choice((name.upper(), name[:-1], "a.lora_A.weight", ""))] = header.pop(name)
    changed = json.dumps(header).encode()
    return len(changed).to_bytes(8, "little") + changed + data[8 + length :]


def edit_config(draw, data):
    config = json.loads(data)
    key = draw.choice([*config, "a_new_key"])
    if draw.random() < 0.2:
        config.pop(key, None)
    else:
        config[key] = draw.choice(VALUES)
    return json.dumps(config).encode()


DAMAGES = [
    (WEIGHTS, flip), (WEIGHTS, cut), (WEIGHTS, lengthen), (WEIGHTS, replace),
    (WEIGHTS, edit_header), (WEIGHTS, edit_header), (CONFIG, flip), (CONFIG, cut),
    (CONFIG, replace), (CONFIG, edit_config), (CONFIG, edit_config), (CONFIG, edit_config),
]  # fmt: skip


def apply(adapter, sites):
    """Run an adapter that loaded at every site."""
    backend = TorchNativeLoRA(pool_of([adapter], sites.all, torch.float32, CPU))
    info = make_batch_info([0, -1], [1, 1], [True, True])
    for site in sites.all:
        last = site.parts[-1]
        out = torch.zeros(2, last.output_start + last.output_size)
        if site.kind is Kind.EMBEDDING:
            h = backend.run_lora_a_embedding(torch.tensor([3, 5]), site, info)
        else:
            h = backend.run_lora_a_sgemm(torch.ones(2, site.input_size), site, info)
        backend.run_lora_b_sgemm(h, site, out, info)
        assert not out[1].any()


def test_a_thousand_damaged_adapters(made, sites, tmp_path):
    own = made("llama")
    model_sites, draw = sites(own.folder), random.Random(11)
    forms = ["patterns", "v-alone", "embedding-and-head", "k-and-gate-of-layer-1"]
    files = {(f, n): (own.adapters[f] / n).read_bytes() for f in forms for n in (CONFIG, WEIGHTS)}
    refused = {damage: 0 for _, damage in DAMAGES}
    tried, told = dict.fromkeys(refused, 0), []
    for _ in range(COUNT):
        form = draw.choice(forms)
        damaged, damage = draw.choice(DAMAGES)
        for name in (CONFIG, WEIGHTS):
            data = files[form, name]
            (tmp_path / name).write_bytes(damage(draw, data) if name == damaged else data)
        tried[damage] += 1
        try:
            adapter = read_adapter("mine", tmp_path, model_sites, torch.float32)
        except AdapterError as error:
            refused[damage] += 1
            told.append(str(error))
        else:
            apply(adapter, model_sites)
    assert all(message.startswith("LoRA adapter 'mine': ") for message in told)
    assert max(map(len, told)) < 2000
    for damage in (cut, lengthen, replace):
        assert refused[damage] == tried[damage], damage.__name__
    # A flipped bit can give another valid number, or another spelling of the same value.
    for damage in (flip, edit_header, edit_config):
        assert 0.3 * tried[damage] < refused[damage], damage.__name__


@pytest.fixture
def huge(made, tmp_path):
    """An adapter of finite numbers that no step survives."""
    folder = tmp_path / "huge"
    shutil.copytree(made("llama").adapters["v-alone"], folder)
    tensors = load_file(folder / WEIGHTS)
    save_file({name: tensor * 1e30 for name, tensor in tensors.items()}, folder / WEIGHTS)
    return folder


def test_an_adapter_that_no_step_survives_is_named_at_start(made, huge):
    own = made("llama")
    modules = {"fine": str(own.adapters["rank-1"]), "huge": str(huge)}
    with pytest.raises(ModelError, match=r"LoRA adapter 'huge': the model's first step failed"):
        LLM(str(own.folder), device="cpu", num_kv_blocks=64, lora_modules=modules)
    llm = LLM(
        str(own.folder), device="cpu", num_kv_blocks=64, lora_modules={"fine": modules["fine"]}
    )
    assert llm.generate([[1, 2]], lora="fine")[0].outputs[0].error is None


def test_it_fails_its_own_requests_alone(made, huge, monkeypatch):
    """As one would whose numbers overflow only for some prompts: the trial step cannot tell."""
    from kiln.engine.runner.model_runner import ModelRunner

    monkeypatch.setattr(ModelRunner, "try_out", lambda own, progress=None: None)
    own = made("llama")
    modules = {"fine": str(own.adapters["rank-1"]), "huge": str(huge)}
    settings = {"device": "cpu", "num_kv_blocks": 64, "seed": 5}
    llm = LLM(str(own.folder), lora_modules=modules, **settings)
    prompts, lora = [[1, 2], [3, 4], [5]], ["fine", "huge", None]
    outputs = [output.outputs[0] for output in llm.generate(prompts, lora=lora)]
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    assert len(llm.generate([[9]], lora=None)[0].outputs[0].token_ids) == 16
