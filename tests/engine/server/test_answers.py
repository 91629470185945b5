"""Whole answers and streams say the same, in OpenAI's form."""

import json

import httpx
import pytest
from metric_lines import value

COMPLETION = {"prompt": [5, 60, 7], "max_tokens": 20, "seed": 3, "temperature": 1.0, "n": 3}
CHAT = {
    "messages": [
        {"role": "system", "content": "Be kind."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Grüße "}, {"type": "text", "text": "日本"}],
        },
    ],
    "max_completion_tokens": 20,
    "seed": 3,
    "n": 2,
}
BODIES = {
    "completion": ("/v1/completions", {**COMPLETION, "ignore_eos": True}),
    "completion, eos": ("/v1/completions", COMPLETION),
    "completions of two prompts": ("/v1/completions", {**COMPLETION, "prompt": ["a", "b"]}),
    "completion, echo": ("/v1/completions", {**COMPLETION, "prompt": "hello", "echo": True}),
    "completion, logprobs": ("/v1/completions", {**COMPLETION, "logprobs": 2}),
    "chat": ("/v1/chat/completions", {**CHAT, "ignore_eos": True}),
    "chat, logprobs": ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}),
}


def _gather(events):
    """Put the chunks of a stream together, by the index of the answer."""
    texts, reasons, logprobs = {}, {}, {}
    for event in events:
        for choice in event["choices"]:
            index = choice["index"]
            new = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            texts[index] = texts.get(index, "") + new
            if choice["finish_reason"]:
                reasons.setdefault(index, []).append(choice["finish_reason"])
            for name, values in (choice["logprobs"] or {}).items():
                logprobs.setdefault(index, {}).setdefault(name, []).extend(values)
    return texts, reasons, logprobs


def _same(one, other):
    """Equal, up to the last digits of logarithms: batches of other sizes round differently."""
    if isinstance(one, dict):
        assert set(one) == set(other)
        for key in one:
            _same(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            _same(*pair)
    elif isinstance(one, float):
        assert one == pytest.approx(other, abs=1e-4)
    else:
        assert one == other


@pytest.mark.parametrize("name", BODIES)
def test_a_stream_adds_up_to_the_whole_answer(api, stream, name):
    path, body = BODIES[name]
    whole = api.post(path, json=body).json()
    texts, reasons, logprobs = _gather(stream(api, path, body))
    choices = whole["choices"]
    assert [choice["index"] for choice in choices] == sorted(texts)
    for choice in choices:
        index = choice["index"]
        expected = choice["message"]["content"] if "message" in choice else choice["text"]
        assert texts[index] == expected
        assert reasons[index] == [choice["finish_reason"]], "once for each answer"
        _same(logprobs.get(index), choice["logprobs"])


@pytest.mark.parametrize("offset", range(1, 14))
def test_a_stop_string_over_a_chunks_border_is_never_sent(api, stream, offset):
    body = {**BODIES["completion"][1], "n": 1, "max_tokens": 40}
    whole = api.post("/v1/completions", json=body).json()["choices"][0]["text"]
    stop = whole[offset : offset + 3]
    events = stream(api, "/v1/completions", {**body, "stop": [stop]})
    texts, reasons, _ = _gather(events)
    assert texts[0] == whole[: whole.index(stop)]
    assert reasons[0] == ["stop"]


def test_a_chat_stream_has_openais_shape(api, stream):
    body = {**CHAT, "ignore_eos": True, "stream_options": {"include_usage": True}}
    events = stream(api, "/v1/chat/completions", body)
    assert [event["choices"][0]["delta"] for event in events[:2]] == [
        {"role": "assistant", "content": ""}
    ] * 2
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["choices"] == []
    usage = events[-1]["usage"]
    assert usage["completion_tokens"] == 40
    assert usage["total_tokens"] == usage["prompt_tokens"] + 40
    assert [*usage["prompt_tokens_details"]] == ["cached_tokens"]  # without asking for it


def test_there_is_no_usage_in_a_stream_that_did_not_ask(api, stream):
    assert all("usage" not in event for event in stream(api, *BODIES["completion"]))


def test_usage_counts_a_prompt_once_and_every_answer(api, tokenizer):
    body = {"prompt": ["hello", "world!"], "n": 2, "max_tokens": 5, "ignore_eos": True}
    usage = api.post("/v1/completions", json=body).json()["usage"]
    assert usage["prompt_tokens"] == sum(len(tokenizer.encode(text)) for text in body["prompt"])
    assert usage["completion_tokens"] == 2 * 2 * 5


def test_a_chat_counts_the_tokens_of_the_rendered_template(api, tokenizer):
    answer = api.post("/v1/chat/completions", json=CHAT).json()
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Grüße \n日本"},  # the texts of two parts are lines
    ]
    assert answer["usage"]["prompt_tokens"] == len(tokenizer.apply_chat_template(messages))
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["choices"][0]["message"]["role"] == "assistant"


def test_chat_without_max_tokens_goes_on_to_the_context(api):
    body = {"messages": CHAT["messages"], "ignore_eos": True}
    answer = api.post("/v1/chat/completions", json=body).json()
    assert answer["usage"]["total_tokens"] == 128
    assert answer["choices"][0]["finish_reason"] == "length"


def test_both_names_of_max_tokens_act(api):
    for name in ("max_tokens", "max_completion_tokens"):
        body = {"messages": CHAT["messages"], "ignore_eos": True, name: 3}
        usage = api.post("/v1/chat/completions", json=body).json()["usage"]
        assert usage["completion_tokens"] == 3


def test_chat_logprobs_are_of_the_drawn_tokens(api, tokenizer):
    body = {**CHAT, "n": 1, "logprobs": True, "top_logprobs": 3, "ignore_eos": True}
    choice = api.post("/v1/chat/completions", json=body).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == 20
    drawn = b"".join(bytes(entry["bytes"]) for entry in content)
    assert drawn.decode(errors="replace") == choice["message"]["content"]
    for entry in content:
        best = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(best) == 3
        assert best == sorted(best, reverse=True)
        assert best[0] >= entry["logprob"]


def test_many_streams_at_once_do_not_mix(api, stream):
    from concurrent.futures import ThreadPoolExecutor

    bodies = [
        {"prompt": [token], "max_tokens": 15, "temperature": 0, "ignore_eos": True}
        for token in range(10, 22)
    ]
    alone = [api.post("/v1/completions", json=body).json()["choices"][0]["text"] for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        streams = pool.map(lambda body: stream(api, "/v1/completions", body), bodies)
    assert [_gather(events)[0][0] for events in streams] == alone


def test_the_models_route_describes_the_one_model(api):
    (card,) = api.get("/v1/models").json()["data"]
    assert card["id"] == "tiny"
    assert card["max_model_len"] == 128
    assert api.get("/v1/models/tiny").json() == card


def test_health_version_and_pages_answer(api):
    assert api.get("/health/live").json() == {"status": "live"}
    for path in ("/health", "/health/ready"):
        assert api.get(path).json() == {"status": "ready"}
    assert api.get("/version").json() == {"version": "0.1.0"}
    for path in ("/", "/docs"):
        page = api.get(path)
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        for outside in ('src="http', 'href="http', "url(http", "@import", "//cdn"):
            assert outside not in page.text


def test_openapi_describes_both_bodies_and_every_reference_resolves(api):
    document = api.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    body = document["paths"]["/v1/completions"]["post"]["requestBody"]
    assert body["content"]["application/json"]["schema"]["$ref"].endswith("/CompletionRequest")
    assert schemas["ChatCompletionRequest"]["additionalProperties"] is False
    text = json.dumps(document)
    for reference in {part.split('"')[0] for part in text.split('"$ref": "')[1:]}:
        assert reference.removeprefix("#/components/schemas/") in schemas, reference


def test_the_request_id_comes_back(api):
    sent = api.get("/version", headers={"X-Request-Id": "mine-1"})
    assert sent.headers["x-request-id"] == "mine-1"
    made = [api.get("/version").headers["x-request-id"] for _ in range(2)]
    assert len(set(made)) == 2
    odd = api.get("/version", headers={"X-Request-Id": "x" * 200})
    assert odd.headers["x-request-id"] != "x" * 200


def test_metrics_count_tokens_and_answers(api, metric):
    before = metric(api, "generation_tokens_total"), metric(api, "prompt_tokens_total")
    body = {"prompt": [5, 6], "max_tokens": 7, "ignore_eos": True, "n": 2}
    api.post("/v1/completions", json=body)
    assert metric(api, "generation_tokens_total") == before[0] + 14
    assert metric(api, "prompt_tokens_total") == before[1] + 2, "once, not for each answer"
    text = api.get("/metrics").text
    assert value(text, "kiln:request_success_total", finished_reason="length") > 0
    for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency"):
        assert f"kiln:{name}_seconds_bucket" in text
    assert metric(api, "kv_blocks_total") == 64


def test_small_answers_do_not_wait_for_a_delayed_ack(api):
    """Without TCP_NODELAY each of them takes 40 ms on a connection that is kept open.

    Not so the first answer on a new connection, which is acknowledged at once.
    """
    import time

    url = api.base_url.join("/version")

    def seconds(client):
        begun = time.perf_counter()
        client.get(url)
        return time.perf_counter() - begun

    kept, new = [], []
    for _ in range(10):
        kept.append(seconds(api))
        with httpx.Client() as fresh:
            new.append(seconds(fresh))
    assert min(kept) < 2 * min(new)


@pytest.mark.parametrize("name", ["completion", "chat"])
def test_an_answer_without_a_seed_tells_the_one_that_was_drawn(api, stream, name):
    path, body = BODIES[name]
    free = {key: value for key, value in body.items() if key != "seed"}
    first, second = (api.post(path, json=free).json()["choices"] for _ in range(2))
    seeds = [choice["seed"] for choice in first + second]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**53 for seed in seeds), "any JSON reader must take it exactly"

    def content(choice):
        return choice["message"]["content"] if "message" in choice else choice["text"]

    for choice in first:
        again = api.post(path, json={**free, "n": 1, "seed": choice["seed"]}).json()["choices"]
        assert content(again[0]) == content(choice)
        assert again[0]["seed"] == choice["seed"]
    events = stream(api, path, body)
    told = {c["index"]: c["seed"] for e in events for c in e["choices"] if "seed" in c}
    assert told == {index: body["seed"] + index for index in range(body["n"])}


def test_the_seeds_of_several_answers_follow_the_rule_of_sampling_params(api):
    body = {**COMPLETION, "seed": -5, "prompt": [[5, 60], [7, 8]]}
    choices = api.post("/v1/completions", json=body).json()["choices"]
    assert [choice["seed"] for choice in choices] == [-5, -4, -3, -5, -4, -3]
