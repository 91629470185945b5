"""What waits for a reader is bounded, and joined so that the reader catches up at once."""

import asyncio

import pytest

from kiln.engine.errors import EngineDeadError, SlowReaderError
from kiln.engine.process.token_stream import MAX_WAITING_TOKENS, TokenStream
from kiln.engine.requests.request import TokenLogprobs, TokenOutput


def test_outputs_that_wait_are_joined_in_order():
    async def test():
        aborted = []
        stream = TokenStream(["a", "b"], aborted.extend)
        first, second = (TokenLogprobs(token, -1.0, 1, []) for token in (1, 2))
        stream.put(TokenOutput("a", [1], logprobs=[first], num_cached_tokens=4, seed=9))
        stream.put(TokenOutput("b", [7]))
        stream.put(TokenOutput("a", [2], "stop", stop_reason=2, logprobs=[second]))
        joined = TokenOutput("a", [1, 2], "stop", stop_reason=2, logprobs=[first, second], seed=9)
        output = await anext(stream)
        assert output.num_cached_tokens == 4
        assert (output.token_ids, output.logprobs) == (joined.token_ids, joined.logprobs)
        assert (output.finish_reason, output.stop_reason, output.seed) == ("stop", 2, 9)
        assert await anext(stream) == TokenOutput("b", [7])
        await stream.aclose()
        assert aborted == ["b"]

    asyncio.run(test())


def test_a_reader_that_never_comes_ends_its_requests():
    async def test():
        aborted = []
        stream = TokenStream(["a", "b"], aborted.extend)
        for index in range(MAX_WAITING_TOKENS):
            stream.put(TokenOutput("a", [index]))
        assert not aborted
        stream.put(TokenOutput("a", [0]))
        assert aborted == ["a", "b"]
        for index in range(10 * MAX_WAITING_TOKENS):  # what was on its way is not kept
            stream.put(TokenOutput("a", [index]))
        with pytest.raises(SlowReaderError, match=str(MAX_WAITING_TOKENS)):
            await anext(stream)

    asyncio.run(test())


def test_a_reader_that_keeps_up_reads_any_number():
    async def test():
        stream = TokenStream(["a"], lambda names: None)
        for index in range(5 * MAX_WAITING_TOKENS):
            stream.put(TokenOutput("a", [index]))
            assert (await anext(stream)).token_ids == [index]

    asyncio.run(test())


def test_what_came_before_an_error_is_read_first():
    async def test():
        aborted = []
        stream = TokenStream(["a"], aborted.extend)
        stream.put(TokenOutput("a", [1]))
        stream.put(EngineDeadError("gone"))
        assert (await anext(stream)).token_ids == [1]
        with pytest.raises(EngineDeadError, match="gone"):
            await anext(stream)
        assert aborted == ["a"]

    asyncio.run(test())
