"""Log-likelihoods of continuations, asked and read as lm-eval does, are those of transformers."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter

import pytest
import torch
import transformers
from depth import at_depth

from kiln.engine.models.dummy_weights import DummyWeights

TASKS = at_depth(12, 200)  # each with four continuations of one context, as of multiple choice
BATCH = 8


@pytest.fixture(scope="module")
def network(server, model_folder):
    """The model of the shared server, with the same dummy weights."""
    config = transformers.AutoConfig.from_pretrained(model_folder)
    network = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    weights = DummyWeights(0, torch.float32)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            weights.fill(name, parameter, parameter.shape)
    return network


def score(client, pairs, **changes):
    """What lm-eval's ``local-completions`` sends for some requests, and reads of the answer."""
    prompts = [context + continuation for context, continuation in pairs]
    body = {"model": "tiny", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1}
    answer = client.post("/v1/completions", json={**body, "seed": 1234, "echo": True, **changes})
    assert answer.status_code == 200, answer.text
    scores = []
    choices = sorted(answer.json()["choices"], key=itemgetter("index"))
    for choice, (context, continuation) in zip(choices, pairs, strict=True):
        own = slice(len(context), len(context) + len(continuation))
        assert len(choice["logprobs"]["tokens"][own]) == len(continuation)
        values = choice["logprobs"]["token_logprobs"][own]
        tops = choice["logprobs"]["top_logprobs"][own]
        greedy = all(one == max(top.values()) for one, top in zip(values, tops, strict=True))
        scores.append((sum(values), greedy))
    return scores


def expected(network, context, continuation):
    with torch.no_grad():
        logits = network(torch.tensor([context + continuation])).logits[0].double()
    rows = logits.log_softmax(-1)[len(context) - 1 : -1]
    values = rows.gather(1, torch.tensor(continuation).unsqueeze(1))
    return float(values.sum()), rows.argmax(-1).tolist() == continuation


def likely(network, context, count):
    ids = torch.tensor([context])
    out = network.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
    )
    return out[0, len(context) :].tolist()


@pytest.mark.parametrize("changes", [{}, {"max_tokens": 0}], ids=["as sent", "nothing generated"])
def test_they_are_those_of_transformers(server, network, changes):
    """Several calls at a time, of requests that share their contexts; some are greedy."""
    chance, pairs = random.Random(5), []
    for _ in range(TASKS):
        context = [chance.randrange(400) for _ in range(chance.randint(1, 100))]
        for _ in range(3):
            length = chance.randint(1, 20)
            pairs.append((context, [chance.randrange(400) for _ in range(length)]))
        pairs.append((context, likely(network, context, chance.randint(1, 5))))
    chance.shuffle(pairs)
    batches = [pairs[first : first + BATCH] for first in range(0, len(pairs), BATCH)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda batch: score(server, batch, **changes), batches))
    flat = [one for scores in found for one in scores]
    for (value, greedy), (context, continuation) in zip(flat, pairs, strict=True):
        wanted, is_greedy = expected(network, context, continuation)
        assert value == pytest.approx(wanted, abs=1e-3)
        assert greedy == is_greedy
    assert any(greedy for _, greedy in flat)


def test_a_text_is_scored_as_its_tokens(server):
    """lm-eval sends texts too, if it is told not to tokenize."""
    text = "The quick brown fox jumps"
    ids = server.post("/tokenize", json={"prompt": text}).json()["tokens"]
    by_text, by_ids = (
        server.post(
            "/v1/completions",
            json={"prompt": prompt, "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0},
        ).json()["choices"][0]["logprobs"]
        for prompt in (text, ids)
    )
    assert by_text["token_logprobs"] == by_ids["token_logprobs"]
