"""An engine that writes what a test says, for the application without a model."""

from __future__ import annotations

from kiln.engine.process.adapter_calls import AdapterCalls
from kiln.engine.process.step_ring import StepRing
from kiln.engine.process.token_stream import TokenStream
from kiln.engine.process.wire import ModelInfo
from kiln.engine.requests.request import TokenLogprobs, TokenOutput

EOS = 2


class Writer:
    """An EngineClient whose outputs are given texts, one token at a time."""

    def __init__(self, tokenizer, *texts, end="stop"):
        self.ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        self.end = end
        self.is_ready = self.is_alive = True
        self.adapters = AdapterCalls(lambda message: None)
        self.model_info = ModelInfo(4096, 1000, "float32", "cpu")
        self.requests = []
        self.steps = StepRing()

    def stats(self):
        return {}

    def watch_steps(self):
        pass

    def stream(self, *requests):
        self.requests = requests
        stream = TokenStream([request.request_id for request in requests], lambda names: None)
        for request, ids in zip(requests, self.ids, strict=True):
            ids = [*ids, EOS] if self.end == "stop" else ids
            for place, token in enumerate(ids):
                reason = self.end if place == len(ids) - 1 else None
                logprobs = [TokenLogprobs(token, -1.0, 1, [])]
                wanted = logprobs if request.params.logprobs is not None else None
                stream.put(TokenOutput(request.request_id, [token], reason, logprobs=wanted))
        return stream
