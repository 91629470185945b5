"""The adapters that ship with the demo model answer in their manners, mixed in one batch."""

from __future__ import annotations

from demo_tasks import held_out
from train_demo_adapters import DEMO, MANNERS

from kiln import LLM, SamplingParams

ADAPTERS = DEMO / "adapters"


def test_each_answers_held_out_questions_in_its_manner():
    llm = LLM(
        str(DEMO),
        device="cpu",
        dtype="float32",
        lora_modules={name: str(ADAPTERS / name) for name in MANNERS},
    )
    pairs = held_out(32, 3)
    names = [None, *MANNERS] * len(pairs)
    chats = [[{"role": "user", "content": pair.question}] for pair in pairs for _ in range(3)]
    outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=64), lora=names)
    exact = dict.fromkeys(names, 0)
    for index, (name, output) in enumerate(zip(names, outputs, strict=True)):
        pair = pairs[index // 3]
        wanted = pair.answer if name is None else MANNERS[name].answer(pair)
        exact[name] += output.outputs[0].text == wanted
    assert min(exact.values()) >= 26, exact


def test_they_are_small():
    for name in MANNERS:
        files = list((ADAPTERS / name).iterdir())
        assert {file.name for file in files} == {"adapter_config.json", "adapter_model.safetensors"}
        assert sum(file.stat().st_size for file in files) < 1e6
