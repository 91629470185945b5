"""The command of examples/ray_serve with two replicas of the demo model on this machine."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import pytest

pytest.importorskip("ray.serve", reason='needs Ray: pip install -e ".[ray]"')

QUESTION = [{"role": "user", "content": "What is 123 + 456?"}]
ANSWERS = {"demo": "579", "sentence": "The answer is 579.", "chatty": "I can do that: 579"}
LONG = {"ignore_eos": True, "max_tokens": 1500, "temperature": 0}


def ask(ray_serve, model: str, messages=QUESTION, **fields) -> httpx.Response:
    body = {"model": model, "messages": messages, "temperature": 0, **fields}
    return httpx.post(f"{ray_serve.url}/v1/chat/completions", json=body, timeout=60)


def ask_at_once(ray_serve, number: int, **fields) -> list[httpx.Response]:
    async def ask_all() -> list[httpx.Response]:
        body = {"model": "sentence", "messages": QUESTION, **LONG, **fields}
        async with httpx.AsyncClient(timeout=120, base_url=ray_serve.url) as client:
            calls = (client.post("/v1/chat/completions", json=body) for _ in range(number))
            return await asyncio.gather(*calls)

    return asyncio.run(ask_all())


def replica_of(response: httpx.Response) -> str:
    assert response.status_code == 200
    return response.headers["x-kiln-replica"]


def test_whole_and_streamed_answers_of_the_model_and_its_adapters(ray_serve):
    for model, text in ANSWERS.items():
        assert ask(ray_serve, model).json()["choices"][0]["message"]["content"] == text
        streamed = ask(ray_serve, model, stream=True)
        assert streamed.headers["content-type"].startswith("text/event-stream")
        *events, done = [line[6:] for line in streamed.text.splitlines() if line]
        deltas = [json.loads(one)["choices"][0]["delta"] for one in events]
        assert done == "[DONE]"
        assert "".join(delta.get("content") or "" for delta in deltas) == text
        time.sleep(1)  # until Ray has told its router which replica has the adapter


def test_events_arrive_one_by_one(ray_serve):
    body = {"model": "demo", "messages": QUESTION, "stream": True, **LONG}
    with httpx.stream("POST", f"{ray_serve.url}/v1/chat/completions", json=body) as response:
        arrivals = [time.monotonic() for _ in response.iter_raw()]
    assert len(arrivals) > 100
    assert arrivals[len(arrivals) // 2] - arrivals[0] > (arrivals[-1] - arrivals[0]) / 10


def test_requests_of_one_adapter_go_to_one_replica_and_other_adapters_to_the_other(ray_serve):
    [sentence], [chatty] = (
        {replica_of(ask(ray_serve, model, _question(number))) for number in range(10)}
        for model in ("sentence", "demo:chatty")
    )
    assert sentence != chatty


def test_the_turns_of_a_conversation_go_to_one_replica_and_conversations_to_both(ray_serve):
    used = set()
    for number in range(16):
        messages = _question(number)
        first = replica_of(ask(ray_serve, "demo", messages))
        messages = [*messages, {"role": "assistant", "content": "1"}, *_question(number)]
        assert replica_of(ask(ray_serve, "demo", messages)) == first
        used.add(first)
    assert used == ray_serve.alive()


def test_under_load_requests_of_one_adapter_use_both_replicas(ray_serve):
    used = [replica_of(response) for response in ask_at_once(ray_serve, 24, max_tokens=300)]
    assert set(used) == ray_serve.alive()
    assert max(map(used.count, used)) <= 16


def test_more_requests_than_may_wait_are_refused(ray_serve):
    responses = ask_at_once(ray_serve, 160, max_tokens=300)
    refused = [one for one in responses if one.status_code != 200]
    assert 0 < len(refused) <= 160 - 2 * (16 + 16)
    for one in refused:
        assert (one.status_code, one.headers["retry-after"]) == (503, "1")
        assert one.json()["error"]["code"] == "queue_full"


def test_errors_of_kiln_pass_unchanged(ray_serve):
    bases = (ray_serve.url, f"http://127.0.0.1:{next(iter(ray_serve.replicas().values()))}")
    for path, body in (
        ("/v1/chat/completions", b'{"model": "nobody", "messages": []}'),
        ("/v1/chat/completions", b'{"model": "demo", "messages": 3}'),
        ("/v1/completions", b"{"),
        ("/v1/nothing", b"{}"),
    ):
        front, kiln = (
            httpx.post(base + path, content=body, headers={"Content-Type": "application/json"})
            for base in bases
        )
        assert (front.status_code, front.content) == (kiln.status_code, kiln.content)
        assert front.status_code >= 400
        assert len(front.headers.get_list("x-request-id")) == 1


def test_routes_that_are_not_about_one_replica(ray_serve):
    url = ray_serve.url
    assert httpx.get(f"{url}/health").json() == {"status": "ready"}
    assert [one["id"] for one in httpx.get(f"{url}/v1/models").json()["data"]] == list(ANSWERS)
    assert len(ray_serve.alive()) == 2
    for verb in ("load", "unload"):
        refused = httpx.post(f"{url}/v1/{verb}_lora_adapter", json={"lora_name": "x"})
        assert refused.status_code == 403
        assert "--lora-modules" in refused.json()["error"]["message"]
    assert httpx.post(f"{url}/v1/completions", content=b"x" * (5 << 20)).status_code == 413


def _question(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What is {number} + {number + 1}?"}]
