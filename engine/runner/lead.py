"""Rank 0 of several: a model runner that tells the other ranks every step before it runs it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

from kiln.engine.config import EngineConfig
from kiln.engine.distributed.channel import Kind
from kiln.engine.distributed.followers import Followers
from kiln.engine.distributed.group import Group
from kiln.engine.models.loader import Progress
from kiln.engine.requests.batch import Batch, StepOutput
from kiln.engine.requests.late_masks import LateMasks
from kiln.engine.runner.executor import Executor
from kiln.engine.runner.lead_store import LeadStore
from kiln.engine.runner.model_runner import ModelRunner
from kiln.engine.runner.offload import LeadHost
from kiln.engine.runner.step_frame import StepFrame, encode


class LeadRunner(ModelRunner):
    """A model runner whose group has other ranks. Each call raises DeviceError if one is gone.

    Until ``lead`` all ranks do the same by themselves: they load, try out and capture.
    """

    def __init__(
        self, config: EngineConfig, followers: Followers, group: Group, progress: Progress | None
    ) -> None:
        self._followers = followers
        # Also at exit, but not at that of a fork of this process.
        self._release = weakref.finalize(self, _release, followers, group, os.getpid())
        super().__init__(config, progress, group)
        if self.rank_store is not None:
            self.adapter_store = LeadStore(self.rank_store, followers)
        if self.host_memory is not None:
            self.host_blocks = LeadHost(self.host_memory, followers)

    def lead(self) -> None:
        """Tell the other ranks each step from now on."""
        self.executor.announce = self._announce
        self._followers.declare_ready()

    def launch(self, batch: Batch) -> Any:
        """Do what ModelRunner does, on all ranks."""
        self.check_ranks()
        return self._blaming(super().launch, batch)

    def bind(self, launched: Any, masks: LateMasks) -> Any:
        """Do what ModelRunner does, on all ranks."""
        return self._blaming(super().bind, launched, masks)

    def collect(self, launched: Any) -> StepOutput:
        """Do what ModelRunner does. Tokens that a rank has not helped to compute are not given."""
        output: StepOutput = self._blaming(super().collect, launched)
        self.check_ranks()
        return output

    def _blaming(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method; if it fails because another rank is gone, raise that rank's error."""
        try:
            return method(*arguments)
        except Exception as error:
            raise self._followers.blame(error) from error

    def check_ranks(self) -> None:
        """Raise DeviceError if another rank is gone, or has not come to a sum."""
        self._followers.check()
        self._group.check()

    def close(self) -> None:
        """Stop the other ranks, and do what ModelRunner does. May be repeated."""
        self._release()
        super().close()

    def _announce(self, frame: StepFrame | None) -> None:
        if frame is None:
            self._followers.call(Executor.follow_sampling)
        else:
            self._followers.send(Kind.STEP, encode(frame))


def _release(followers: Followers, group: Group, process_id: int) -> None:
    if os.getpid() != process_id:
        return
    followers.stop()
    group.close()  # together with them; one that waits for a sum of this rank ends too
    followers.close()
