"""Ray Serve's request router with affinity to adapters and to beginnings of prompts.

Ray knows the adapters of each replica from ``serve.multiplexed`` (see kiln_replica.py). Ray's own
PrefixCacheAffinityRouter (2.60) knows adapters too, but chooses by the adapter or by the prompt,
never by both, and its module imports vLLM or SGLang.
"""

from __future__ import annotations

import kiln_counts  # as a whole: Ray copies this file to where it runs, and must not copy counters
from kiln_affinity import PrefixMemory, rank
from kiln_call import Call
from ray.serve.request_router import (
    MultiplexMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

_UNKNOWN_LOAD = 1 << 30  # of a replica that does not say how many requests it has: the last choice


class AffinityRouter(MultiplexMixin, RequestRouter):
    """Prefers a replica that has the adapter, then the longest beginning, then the lowest load.

    Each front has a router of its own, which remembers the prompts that it has routed itself.
    """

    def initialize_state(self, spill_above: int = 8) -> None:
        """Take the settings of ``RequestRouterConfig.request_router_kwargs``."""
        self._memory = PrefixMemory()
        self._spill_above = spill_above

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replicas in groups; Ray tries the next one when a group has no room."""
        if pending_request is None:
            return [candidate_replicas]
        # Without this Ray asks again at once, in a loop, when all replicas are full.
        pending_request.routing_context.should_backoff = True
        call = _call(pending_request)
        by_id = {
            one.replica_id: one
            for one in candidate_replicas
            if one.replica_id.unique_id not in call.tried
        } or {one.replica_id: one for one in candidate_replicas}
        fresh = list(by_id.values())
        adapter = pending_request.metadata.multiplexed_model_id
        tiers = dict.fromkeys(by_id, 0)
        if adapter:
            ranked = self.rank_replicas_via_multiplex(fresh, adapter)
            tiers = {one.replica_id: tier for tier, group in enumerate(ranked) for one in group}
        loads = await self._loads(fresh)
        groups = rank(loads, tiers, self._memory.matches(call.chain), self._spill_above)
        return [[by_id[replica_id] for replica_id in group] for group in groups]

    async def _loads(self, replicas: list[RunningReplica]) -> dict[ReplicaID, int]:
        """Return the requests that each replica works on; ask those of which Ray does not know."""
        cache = self.replica_queue_len_cache
        known = {one.replica_id: cache.get(one.replica_id) for one in replicas}
        unknown = [one for one in replicas if known[one.replica_id] is None]
        for replica, load in await self._probe_queue_lens(unknown, 0):
            known[replica.replica_id] = load
        return {one: _UNKNOWN_LOAD if load is None else load for one, load in known.items()}

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        """Count and remember the prompt after the replica has accepted it."""
        chain = _call(pending_request).chain
        matches = self._memory.matches(chain)
        longest = max(matches.values(), default=0)
        hit = "hit" if matches.get(replica_id, 0) == longest else "spill"
        kiln_counts.ROUTED.labels(hit if longest else "miss").inc()
        self._memory.remember(chain, replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Forget what replicas that are gone have seen."""
        super().update_replicas(replicas)
        self._memory.forget_all_but([one.replica_id for one in replicas])


def _call(pending_request: PendingRequest) -> Call:
    [call] = pending_request.args
    assert isinstance(call, Call)
    return call
