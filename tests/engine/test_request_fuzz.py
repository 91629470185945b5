"""Valid requests at the edges of every setting: each is answered, and no other is changed by it."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from depth import at_depth

from kiln.engine.llm import LLM
from kiln.engine.requests import sampling_params as limits
from kiln.engine.requests.sampling_params import SamplingParams

DEMO = str(Path(__file__).parents[2] / "engine" / "demo")
CONTEXT, VOCABULARY = 96, 768
NUM_ALONE, NUM_BATCHED, PER_BATCH = *at_depth((60, 160), (400, 1600)), 80

# Long enough to be cut into chunks, and to be preempted.
ORDINARY = [
    (list(range(5 + index, 30 + index)), SamplingParams(temperature=heat, seed=7, max_tokens=12))
    for index, heat in enumerate((0.0, 0.7, 1.0, 0.0))
]


@pytest.fixture(scope="module")
def llm():
    """Fewer rows than requests and a small pool: batches mix, and requests are preempted."""
    return LLM(
        DEMO,
        device="cpu",
        max_model_len=CONTEXT,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        block_size=2,
        num_kv_blocks=52,
    )


def some_tokens(chance, most):
    """One token, a few, as many as there may be, or the whole vocabulary."""
    count = chance.choice([1, 3, most, VOCABULARY])
    return chance.sample(range(VOCABULARY), min(count, most, VOCABULARY))


def stop_strings(chance):
    letters = ["a", "e", " ", "\n", "é", "😀", "the"]
    longest = "".join(chance.choices("ab c", k=limits.MAX_STOP_STRING_CHARS))
    whole = [chance.choice(letters) * chance.randint(1, 3) for _ in range(limits.MAX_STOP_STRINGS)]
    return chance.choice([chance.choice(letters), [longest], whole])


def biases(chance):
    size = chance.choice([-limits.MAX_BIAS, limits.MAX_BIAS, 0.0, 1e-40, None])
    return {
        token: chance.uniform(-limits.MAX_BIAS, limits.MAX_BIAS) if size is None else size
        for token in some_tokens(chance, limits.MAX_LOGIT_BIAS)
    }


def edges(chance):
    """A value at an edge of each setting's range, or just inside it, or anywhere in it."""
    heats = [0, 5e-324, 1e-6, 1e-5, 0.3, 1.0, limits.MAX_TEMPERATURE]
    penalties = [-limits.MAX_PENALTY, limits.MAX_PENALTY, 1e-45, chance.uniform(-2, 2)]
    counts = [1, 2, VOCABULARY - 1, VOCABULARY, VOCABULARY + 1, limits.MAX_COUNT, -1, 0]
    seeds = [0, 1, -1, limits.MAX_SEED, -limits.MAX_SEED, 2**53, chance.getrandbits(62), None]
    repetition = [limits.MIN_REPETITION_PENALTY, limits.MAX_REPETITION_PENALTY, 1 - 1e-9, 1.3]
    return {
        "temperature": chance.choice([*heats, math.nextafter(limits.MAX_TEMPERATURE, 0)]),
        "top_p": chance.choice([1.0, 1 - 2**-53, 0.5, 1e-9, 5e-324]),
        "top_k": chance.choice(counts),
        "min_p": chance.choice([0.0, 5e-324, 1e-9, 0.5, 1 - 2**-53, 1.0]),
        "seed": chance.choice(seeds),
        "n": chance.choice([1, 2, limits.MAX_ANSWERS]),
        "max_tokens": chance.choice([1, 2, 3]),
        "stop": stop_strings(chance),
        "include_stop_str_in_output": True,
        "stop_token_ids": some_tokens(chance, limits.MAX_STOP_TOKEN_IDS),
        "ignore_eos": True,
        "skip_special_tokens": False,
        "logprobs": chance.choice([0, 1, limits.MAX_LOGPROBS]),
        "presence_penalty": chance.choice(penalties),
        "frequency_penalty": chance.choice(penalties),
        "repetition_penalty": chance.choice(repetition),
        "logit_bias": biases(chance),
    }


def extreme(chance):
    """A prompt, and settings of which about a third are at an edge."""
    share = chance.choice([0.15, 0.4, 1.0])
    every = {"max_tokens": chance.randint(1, 4), **edges(chance)}
    settings = {name: value for name, value in every.items() if chance.random() < share}
    settings.setdefault("max_tokens", chance.randint(1, 4))
    if chance.random() < 0.9:
        settings.pop("n", None)  # eight answers take as long as eight requests
    length = chance.randint(1, 12)
    if chance.random() < 0.05:  # up to the end of the context, and past what it holds
        length = chance.choice([CONTEXT - 1, CONTEXT - 2, CONTEXT - 9])
        settings["max_tokens"] = chance.choice([None, limits.MAX_COUNT, 5])
    biases = settings.get("logit_bias", {}).items()
    banned = {token for token, bias in biases if bias <= -limits.MAX_BIAS}
    left = VOCABULARY - len(banned.union(settings.get("stop_token_ids", ())))
    if chance.random() < 0.3 and left > 9:  # a request that bans all, EOS included, is refused
        most = settings["max_tokens"] or limits.MAX_COUNT
        settings["min_tokens"] = chance.choice([1, most])
    prompt = [chance.randrange(VOCABULARY) for _ in range(length)]
    return prompt, SamplingParams(**settings)


def check(prompt, params, output):
    assert len(output.outputs) == params.n
    for answer in output.outputs:
        assert answer.finish_reason in ("stop", "length")
        assert 1 <= len(answer.token_ids) <= min(params.max_tokens or CONTEXT, CONTEXT)
        assert all(0 <= token < VOCABULARY for token in answer.token_ids)
        if answer.finish_reason == "stop":
            assert len(answer.token_ids) >= params.min_tokens
        if params.logprobs is not None:
            assert len(answer.logprobs) == len(answer.token_ids)
            values = [one.logprob for at in answer.logprobs for one in at.values()]
            assert all(value <= 0 for value in values)  # no NaN either


def is_idle(llm):
    llm.core.scheduler.kv.pool.check_integrity()
    return not llm.core.has_work and llm.core.stats().kv_blocks_used == 0


def test_extreme_requests_alone_are_answered(llm):
    chance = random.Random(1)
    for _ in range(NUM_ALONE):
        prompt, params = extreme(chance)
        (output,) = llm.generate([prompt], params)
        check(prompt, params, output)
    assert is_idle(llm)


def test_extreme_requests_in_batches_are_answered_and_change_nobodys_tokens(llm):
    chance = random.Random(2)
    wanted = [llm.generate([prompt], params)[0].outputs[0] for prompt, params in ORDINARY]
    for _ in range(NUM_BATCHED // PER_BATCH):
        requests = [extreme(chance) for _ in range(PER_BATCH)]
        places = [(chance.randrange(PER_BATCH), which) for which in range(len(ORDINARY))]
        for place, which in places:
            requests[place] = ORDINARY[which]
        outputs = llm.generate(*map(list, zip(*requests, strict=True)))
        for (prompt, params), output in zip(requests, outputs, strict=True):
            check(prompt, params, output)
            for which, ordinary in enumerate(ORDINARY):
                if ordinary == (prompt, params):
                    assert output.outputs[0] == wanted[which]
    assert is_idle(llm)
    assert llm.core.stats().preemptions > 0 or at_depth(True, False)  # few requests are too few
