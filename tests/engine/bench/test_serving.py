"""The serving benchmark sends prompts whose beginnings no prefix cache knows."""

from __future__ import annotations

import random

from kiln.engine.bench import serving
from kiln.engine.bench.load_client import Arrivals


def test_no_run_and_no_warm_up_begins_with_tokens_that_were_sent_before(monkeypatch):
    sent = []

    async def load(url, bodies, arrivals, api_key):
        sent.append([tuple(body["prompt"]) for body in bodies])
        return 1.0, []

    monkeypatch.setattr(serving, "run_load", load)
    monkeypatch.setattr(serving, "summarise", lambda seconds, answers: {"output_tokens": 2 * 8})
    prompts = [random.Random(seed).sample(range(9000), 400) for seed in range(8)]
    for _ in range(2):
        serving.measure("http://x", prompts, 2, Arrivals(4))
    assert [len(bodies) for bodies in sent] == [4, 8, 4, 8]
    beginnings = [prompt[:16] for bodies in sent for prompt in bodies]
    assert len(set(beginnings)) >= len(beginnings) - 2  # two rotations may be one, by chance
    for bodies in sent:
        for prompt, given in zip(bodies, prompts, strict=False):
            assert sorted(prompt) == sorted(given)
