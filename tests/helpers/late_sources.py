"""A MaskSource whose masks depend on all tokens before, for requests named "late…"."""

from __future__ import annotations

import random
import time


class LateSource:
    """``bits`` returns the mask behind some tokens.

    With ``seed`` some masks are not ready in time, and their requests may not run for a few steps.
    ``answers`` are the whole tokens of requests, proposed as forced tokens, of which one is wrong
    with the probability ``wrong``.
    """

    def __init__(self, bits, *, seed=None, seconds=0.0, fail=None, answers=None, wrong=0.3):
        self.bits, self.seconds, self.fail = bits, seconds, fail
        self.chance = None if seed is None else random.Random(seed)
        self.answers, self.wrong, self.guesses = answers, wrong, random.Random(seed)
        self.live, self.held, self.missed, self.most_forced = set(), {}, 0, 0

    def begin(self, new):
        if not new.request_id.startswith("late"):
            return False
        self.live.add(new.request_id)
        return True

    def end(self, request_id):
        self.live.discard(request_id)

    def may_run(self, request):
        assert request.request_id in self.live
        held = self.held.get(request.request_id, 0)
        self.held[request.request_id] = max(held - 1, 0)
        return not held

    def wait(self):
        pass

    def masks(self, wanted, patience):
        made = {}
        for request, drafts in wanted:
            time.sleep(self.seconds)
            if self.fail == (request.request_id, request.num_output_tokens):
                made[request.request_id] = ValueError("no such rule")
            elif self.chance is not None and self.chance.random() < 0.2:
                self.held[request.request_id] = self.chance.randint(0, 4)
                self.missed += 1
            else:
                tokens = [*request.token_ids, *drafts]
                ends = range(len(request.token_ids), len(tokens) + 1)
                made[request.request_id] = [self.bits(tokens[:end]) for end in ends]
        return made

    def forced(self, request, most):
        if self.answers is None:
            return ()
        first = len(request.token_ids) + max(request.num_pending - 1, 0)
        count = self.guesses.randint(1, most) + (request.num_pending > 0)
        tokens = self.answers[request.request_id][first : first + count]
        if len(tokens) <= (request.num_pending > 0):
            return ()
        self.most_forced = max(self.most_forced, len(tokens))
        return [one if self.guesses.random() > self.wrong else 3 for one in tokens]
