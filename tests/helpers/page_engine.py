"""An engine for the tests of the chat page: it answers each question as a test says."""

from __future__ import annotations

import math

from scripted_engine import Writer
from writing_engine import OneByOne

from kiln.engine.errors import EngineDeadError
from kiln.engine.requests.request import TokenLogprobs, TokenOutput

HANGS = "…"  # an answer that ends so does not end


class Speaker(Writer):
    """Answers the question that stands last in the prompt; a list is answered in turn.

    Each answer may be an exception. The last of a list answers all further requests. An answer
    whose text ends with ``HANGS`` goes on forever.
    """

    def __init__(self, tokenizer, answers):
        self.unready = ""  # why it takes no requests
        super().__init__(tokenizer)
        self.answers = {question: _listed(answer) for question, answer in answers.items()}
        self.requests, self.prompts, self.aborted = [], [], []
        self._tokenizer = tokenizer
        self._eos = min(tokenizer.eos_token_ids)

    @property
    def model_info(self):
        if self.unready:
            raise EngineDeadError(self.unready)
        return self._info

    @model_info.setter
    def model_info(self, info):
        self._info = info

    def stream(self, *requests):
        (request,) = requests
        self.requests.append(request)
        prompt = self._tokenizer.backend.decode(request.prompt_token_ids, skip_special_tokens=False)
        self.prompts.append(prompt)
        asked = max(self.answers, key=prompt.rfind)
        texts = self.answers[asked]
        answer = texts.pop(0) if len(texts) > 1 else texts[0]
        if isinstance(answer, Exception):
            return self._stream(request, [answer])
        ids = self._tokenizer.encode(answer.removesuffix(HANGS), add_special_tokens=False)
        ids = ids if answer.endswith(HANGS) else [*ids, self._eos]
        return self._stream(request, [self._output(request, one, i) for i, one in enumerate(ids)])

    def _stream(self, request, items):
        stream = OneByOne(request.request_id, items)
        stream._abort = self.aborted.extend
        return stream

    def _output(self, request, token, place):
        logprobs = None
        if (top := request.params.logprobs) is not None:
            own = -0.02 - (place * 7919 % 13) / 6
            rest = [(token + i + 1, own - 0.6 - i * math.log(2), i + 2) for i in range(top - 1)]
            logprobs = [TokenLogprobs(token, own, 1, [(token, own, 1), *rest])]
        reason = "stop" if token == self._eos else None
        return TokenOutput(request.request_id, [token], reason, logprobs=logprobs)


def _listed(answer):
    return list(answer) if isinstance(answer, list) else [answer]
