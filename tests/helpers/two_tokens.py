"""A stand-in for the client of an engine, for what the server tells of a request."""

import asyncio

from kiln.engine.process.adapter_calls import AdapterCalls
from kiln.engine.process.token_stream import TokenStream
from kiln.engine.process.wire import ModelInfo
from kiln.engine.requests.request import TokenOutput


class TwoTokens:
    """An EngineClient whose answers are two tokens; ``last`` says how they end."""

    is_ready = is_alive = True
    model_info = ModelInfo(64, 400, "float32", "cpu")

    def __init__(self, last=("length", None)):
        self.adapters = AdapterCalls(lambda message: None)
        self.last = last

    def stats(self):
        return {}

    def stream(self, new):
        stream = TokenStream([new.request_id], lambda ids: None)
        stream.put(TokenOutput(new.request_id, [7], queue_seconds=0.25, num_cached_tokens=1))
        reason, message = self.last
        later = TokenOutput(new.request_id, [8] * (not message), reason, message=message)
        asyncio.get_running_loop().call_later(0.01, stream.put, later)
        return stream
