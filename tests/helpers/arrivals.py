"""Requests that arrive at an engine while others run, and may be aborted."""

from __future__ import annotations

LIMIT = 6000  # steps


def run_to_end(core, arrivals, check, resets=()):
    """Run all requests; return each one's tokens, finish reason and message, by its id.

    ``arrivals``: (step, steps until the abort or None, request). ``check`` gets the core behind
    each step. ``resets``: steps at which the prefix cache is reset.
    """
    found = {}
    last = max((arrival for arrival, *_ in arrivals), default=0)
    for step in range(LIMIT):
        for arrival, abort, new in arrivals:
            if arrival == step:
                core.add(new)
            if abort == step - arrival:
                core.abort(new.request_id)
        if step in resets:
            core.reset_prefix_cache()
        for output in core.step():
            tokens, *_ = found.get(output.request_id, ([],))
            reason, message = output.finish_reason, output.message
            found[output.request_id] = ([*tokens, *output.token_ids], reason, message)
        check(core)
        if not core.has_work and step > last:
            assert core.stats().kv_blocks_used == 0
            return found
    raise AssertionError("the engine did not finish")
