"""Drafters that know the answers, and propose them with some tokens wrong."""

from __future__ import annotations

import random

from kiln.engine.requests.drafts import Draft

DRAFTS = 3


class Scripted:
    """Knows the answers, and proposes them with some tokens wrong, as a host or a device does."""

    wanted, num_tokens = 0, DRAFTS

    def begin(self, num_rows, *, with_prompts):
        pass

    def observe(self, batch, sampled):
        for row in batch.requests:
            if row.request_id in sampled:
                assert len(sampled[row.request_id].token_ids) <= row.num_samples

    def __init__(self, answers, seed, right=0.7):
        self.answers, self.chance, self.right = answers, random.Random(seed), right

    def following(self, request_id, known, most):
        """Return up to so many tokens that may follow."""
        tokens = self.answers[request_id][len(known) : len(known) + most]
        return [token if self.chance.random() < self.right else 3 for token in tokens]


class HostDrafter(Scripted):
    def propose(self, request, most):
        if request.num_pending:
            return Draft(0)
        tokens = self.following(
            request.request_id, request.token_ids, self.chance.randint(0, min(most, DRAFTS))
        )
        return Draft(len(tokens), tuple(tokens))


class DeviceDrafter(Scripted):
    """The scheduler asks for a number of drafts; the runner makes them behind each step."""

    def propose(self, request, most):
        return Draft(self.chance.choice([0, 1, 1]) * min(most, DRAFTS))

    def __call__(self, request_id, known):
        return self.following(request_id, known, DRAFTS)
