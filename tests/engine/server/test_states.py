"""What the application answers when the engine is loading, failing, stalled or gone."""

import asyncio
import json
import threading

import httpx
import pytest
from metric_lines import value
from one_life import OneLife

from kiln.engine.errors import EngineDeadError, ModelError, RequestLostError
from kiln.engine.process.adapter_calls import AdapterCalls
from kiln.engine.process.token_stream import TokenStream
from kiln.engine.process.wire import ModelInfo
from kiln.engine.requests.request import TokenLogprobs, TokenOutput
from kiln.engine.server.app import create_app
from kiln.engine.server.completions import CompletionForm
from kiln.engine.server.protocol import CompletionRequest
from kiln.engine.server.serving import ServerSettings, read_defaults

BODY = {"prompt": [5], "max_tokens": 3}


class StandIn:
    """An EngineClient that gives the outputs it is told to; an exception is raised."""

    def __init__(self, *outputs):
        self.outputs = outputs
        self.is_ready = self.is_alive = True
        self.loading = False
        self.aborted = []
        self.adapters = AdapterCalls(lambda message: None)

    @property
    def model_info(self):
        if self.loading:
            raise EngineDeadError("the engine is still loading the model")
        return ModelInfo(128, 400, "float32", "cpu")

    def stats(self):
        return {}

    def stream(self, *requests):
        names = [request.request_id for request in requests]
        stream = TokenStream(names, self.aborted.extend)
        self.feeding = asyncio.create_task(self._feed(stream, names[0]))
        return stream

    async def _feed(self, stream, name):
        """Give each output when the one before it was read."""
        for output in self.outputs:
            if isinstance(output, TokenOutput):
                output = output._replace(request_id=name, message="NaN")
            stream.put(output)
            for _ in range(20):
                await asyncio.sleep(0)


def call(client, method="POST", path="/v1/completions", app=None, **options):
    app = app or create_app(OneLife(client), None, ServerSettings(("tiny",)))

    async def send():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            return await http.request(method, path, **options)

    return asyncio.run(send())


TOKEN = TokenOutput("", [7])
LAST = TokenOutput("", [7], "length")
ROW_FAILED = TokenOutput("", [], "error")
DEAD = EngineDeadError("the engine process was killed by signal 9")


@pytest.mark.parametrize(
    ("outputs", "status", "words"),
    [
        ([TOKEN, LAST], 200, "length"),
        ([TOKEN, ROW_FAILED], 500, "NaN"),
        ([TOKEN, DEAD], 503, "signal 9"),
        ([DEAD], 503, "signal 9"),
    ],
)
def test_an_answer_in_one_piece_tells_how_it_ended(outputs, status, words):
    answer = call(StandIn(*outputs), json=BODY)
    assert answer.status_code == status
    assert words in answer.text


@pytest.mark.parametrize(("end", "words"), [(ROW_FAILED, "NaN"), (DEAD, "signal 9")])
def test_a_stream_that_fails_late_ends_with_an_error_event(end, words):
    answer = call(StandIn(TOKEN, end), json={**BODY, "stream": True})
    events = [line for line in answer.text.split("\n\n") if line]
    assert answer.status_code == 200
    assert events[-1] == "data: [DONE]"
    assert '"error"' in events[-2]
    assert words in events[-2]


def test_a_stream_that_fails_at_once_has_the_errors_status():
    answer = call(StandIn(DEAD), json={**BODY, "stream": True})
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_unavailable"
    assert answer.headers["retry-after"]


def test_a_bug_is_500_without_its_traceback(caplog):
    class Broken(StandIn):
        def stream(self, *requests):
            raise ZeroDivisionError("secret detail")

    answer = call(Broken(), json=BODY, headers={"X-Request-Id": "me-1"})
    assert answer.status_code == 500
    error = answer.json()["error"]
    assert error["code"] == "internal_error"
    assert "me-1" in error["message"]
    assert "secret" not in answer.text


def test_what_is_found_wrong_while_answers_are_prepared_is_400_by_name():
    """The stand-in has no tokenizer, which bad words need."""
    answer = call(StandIn(), json={**BODY, "bad_words": ["x"]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "bad_words"


def test_while_loading_probes_tell_live_and_not_ready():
    client = StandIn()
    client.loading, client.is_ready = True, False
    assert call(client, "GET", "/health/live").status_code == 200
    for method, path in (("GET", "/health/ready"), ("POST", "/v1/completions")):
        answer = call(client, method, path, json=BODY)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "loading"
    (card,) = call(client, "GET", "/v1/models").json()["data"]
    assert (card["max_model_len"], card["task"]) == (None, None)


def test_without_an_engine_nothing_is_live():
    client = StandIn()
    client.is_alive = client.is_ready = False
    for path in ("/health", "/health/live", "/health/ready"):
        assert call(client, "GET", path).status_code == 503
    assert call(client, json=BODY).json()["error"]["code"] == "engine_unavailable"
    assert value(call(client, "GET", "/metrics").text, "kiln:engine_ready") == 0


def test_only_what_the_engine_never_had_may_be_sent_again():
    """Clients of OpenAI and of Anthropic send most requests again by themselves."""
    for error, header, said in (
        (DEAD, "retry-after", "5"),
        (RequestLostError("the engine process was killed by signal 9"), "x-should-retry", "false"),
    ):
        for stream in (False, True):
            answer = call(StandIn(error), json={**BODY, "stream": stream})
            assert answer.status_code == 503
            assert answer.headers[header] == said
            assert len({"retry-after", "x-should-retry"} & set(answer.headers)) == 1


def test_a_restart_is_live_and_not_ready():
    client = StandIn()
    client.is_alive = client.is_ready = False
    engine = OneLife(client)
    engine.is_restarting = True
    app = create_app(engine, None, ServerSettings(("tiny",)))
    assert call(None, "GET", "/health/live", app=app).status_code == 200
    for method, path in (("GET", "/health/ready"), ("POST", "/v1/completions")):
        answer = call(None, method, path, app=app, json=BODY)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "restarting"
        assert answer.headers["retry-after"] == "5"


def test_a_draining_server_takes_no_more():
    client = StandIn(LAST)
    app = create_app(OneLife(client), None, ServerSettings(("tiny",)))
    assert call(client, app=app, json=BODY).status_code == 200
    app.state.serving.draining = True
    answer = call(client, app=app, json=BODY)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "draining"
    assert call(client, "GET", "/health/ready", app=app).status_code == 503
    assert call(client, "GET", "/health/live", app=app).status_code == 200


def test_without_a_tokenizer_text_is_refused_and_tokens_are_served():
    client = StandIn(LAST)
    assert call(client, json=BODY).status_code == 200
    for path, body in (
        ("/v1/completions", {"prompt": "text"}),
        ("/v1/completions", {**BODY, "stop": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ):
        answer = call(client, path=path, json=body)
        assert answer.status_code == 400
        assert "tokenizer" in answer.json()["error"]["message"]


def test_a_long_answer_is_written_beside_the_event_loop(monkeypatch):
    threads = []
    write = CompletionForm.answer

    def spy(form):
        threads.append(threading.current_thread())
        return write(form)

    monkeypatch.setattr(CompletionForm, "answer", spy)
    for count in (1, 1000):
        likely = TokenLogprobs(7, -1.0, 1, [(token, -1.0, token) for token in range(1, 21)])
        long = TokenOutput("", [7] * count, "length", logprobs=[likely] * count)
        answer = call(StandIn(long), json={**BODY, "logprobs": 20})
        assert len(answer.json()["choices"][0]["logprobs"]["tokens"]) == count
    short, long = threads
    assert short is threading.main_thread()
    assert long is not short


def test_a_value_that_no_request_could_have_is_no_default(tmp_path):
    path = tmp_path / "generation_config.json"
    path.write_text('{"temperature": -1}')
    with pytest.raises(ModelError, match=r"generation_config\.json: temperature must be"):
        read_defaults(tmp_path)


def test_every_default_of_the_model_is_a_default_of_its_requests(tmp_path):
    own = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}
    (tmp_path / "generation_config.json").write_text(json.dumps(own))
    params = CompletionRequest(prompt="a").sampling_params(read_defaults(tmp_path))
    assert {name: getattr(params, name) for name in own} == own
    asked = CompletionRequest(prompt="a", repetition_penalty=1.5, top_k=-1)
    params = asked.sampling_params(read_defaults(tmp_path))
    assert (params.repetition_penalty, params.top_k) == (1.5, -1)
    (tmp_path / "generation_config.json").write_text(json.dumps({**own, "do_sample": False}))
    params = CompletionRequest(prompt="a").sampling_params(read_defaults(tmp_path))
    assert (params.temperature, params.repetition_penalty) == (0.0, 1.05)
