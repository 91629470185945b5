"""The real openai client, end to end, against the demo model."""

import openai
import pytest

QUESTION = [{"role": "user", "content": "What is 17 + 25?"}]


@pytest.fixture(scope="module")
def client(locked_url, api_key):
    return openai.OpenAI(base_url=f"{locked_url}/v1", api_key=api_key, max_retries=0, timeout=120)


def test_models(client):
    (model,) = client.models.list().data
    assert model.id == "demo"
    assert client.models.retrieve("demo").id == "demo"


def test_chat(client):
    answer = client.chat.completions.create(model="demo", messages=QUESTION)
    assert answer.choices[0].message.content == "42"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_chat_that_streams(client):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(model="demo", messages=QUESTION, **options))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "42"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens > 0


def test_an_answer_can_be_sent_back_as_it_came(client):
    answer = client.chat.completions.create(model="demo", messages=QUESTION)
    said = answer.choices[0].message
    for form in (said, said.model_dump()):
        again = client.chat.completions.create(
            model="demo", messages=[*QUESTION, form, {"role": "user", "content": "Hello"}]
        )
        assert again.choices[0].message.content


def test_chat_with_many_settings(client):
    answer = client.chat.completions.create(
        model="demo",
        messages=[{"role": "system", "content": "Be brief."}, *QUESTION],
        n=3,
        temperature=0.7,
        top_p=0.9,
        seed=7,
        max_completion_tokens=12,
        stop=["\n\n"],
        logprobs=True,
        top_logprobs=2,
        user="somebody",
        extra_body={"top_k": 20, "min_p": 0.01},
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)


def test_completions(client):
    answer = client.completions.create(
        model="demo", prompt=["a", "b"], max_tokens=4, logprobs=1, temperature=0
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.object == "text_completion"
    chunks = client.completions.create(
        model="demo", prompt=[5, 6, 7], max_tokens=4, stream=True, extra_body={"ignore_eos": True}
    )
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"


def test_errors_arrive_as_the_clients_own(client):
    create = client.chat.completions.create
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        create(model="gpt-9", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        create(model="demo", messages=QUESTION, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="tools"):
        create(model="demo", messages=QUESTION, tools=[{"type": "function"}])
    with pytest.raises(openai.BadRequestError, match="did you mean top_k") as caught:
        create(model="demo", messages=QUESTION, extra_body={"topk": 1})
    other = openai.OpenAI(base_url=client.base_url, api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        other.models.list()


def test_a_stream_that_is_closed_early_leaves_the_server_well(client):
    stream = client.chat.completions.create(
        model="demo", messages=QUESTION, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    assert test_chat(client) is None


def test_the_async_client(client):
    import asyncio

    async def ask():
        options = {"api_key": client.api_key, "max_retries": 0}
        async with openai.AsyncOpenAI(base_url=client.base_url, **options) as own:
            answers = await asyncio.gather(
                *(own.chat.completions.create(model="demo", messages=QUESTION) for _ in range(8))
            )
        return {answer.choices[0].message.content for answer in answers}

    assert asyncio.run(ask()) == {"42"}
