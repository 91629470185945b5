"""An engine process whose core counts instead of computing: for tests of the process boundary.

A request's tokens are the ids that follow its last prompt token; special prompts misbehave.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from kiln.engine.errors import AdapterError, DeviceError, ModelError, RequestError
from kiln.engine.lora.jobs import JobResult
from kiln.engine.process.wire import ModelInfo
from kiln.engine.process.worker import run
from kiln.engine.requests.adapter_job import AdapterInfo, LoadAdapter
from kiln.engine.requests.finish import stop_token_ids
from kiln.engine.requests.step_log import StepLog, StepRecord

REFUSE, CRASH, SLEEP, DIE, LOSE, SILENT = 1001, 1002, 1003, 1004, 1005, 1006
FAIL, FAIL_AT_ONCE = 1007, 1008
HANG, BURN = 1009, 1010  # a step that never ends, and one of two seconds of processor time
MISSING_MODEL = "missing"
CONTEXT = 512
VOCABULARY = 2000


@dataclass
class Stats:
    running: int
    waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 100


class FakeAdapters:
    """Adapters by name. One whose folder has a file "fatal" kills the engine."""

    def __init__(self, modules=()):
        self._infos = {one.name: AdapterInfo(one.name, one.path, False, 8, 64) for one in modules}
        self._begun = []

    @property
    def infos(self):
        return list(self._infos.values())

    @property
    def are_pending(self):
        return bool(self._begun)

    def begin(self, job):
        self._begun.append(job)

    def end(self):
        begun, self._begun = self._begun, []
        return [JobResult(job.job_id, self._do(job)) for job in begun]

    def _do(self, job):
        if not isinstance(job, LoadAdapter):
            del self._infos[job.name]
        elif Path(job.path, "fatal").exists():
            os.kill(os.getpid(), 9)
        elif not Path(job.path).is_dir():
            return AdapterError(f"LoRA adapter {job.name!r}: no such folder")
        else:
            self._infos[job.name] = AdapterInfo(job.name, job.path, job.pinned, 8, 64)
        return None


class FakeCore:
    def __init__(self, step_seconds=0.0, modules=()):
        self.requests = {}
        self.step_seconds = step_seconds
        self.num_steps = 0
        self.step_log = StepLog()
        self.adapters = FakeAdapters(modules)

    @property
    def has_work(self):
        return bool(self.requests)

    def add(self, new):
        if new.prompt_token_ids[-1] == REFUSE:
            raise RequestError("the prompt is refused", "prompt")
        self.requests[new.request_id] = [new, 0]

    def abort(self, request_id):
        self.requests.pop(request_id, None)

    def check_ranks(self):
        pass

    def stats(self):
        return Stats(running=len(self.requests), kv_blocks_used=len(self.requests))

    def step(self):
        time.sleep(self.step_seconds)
        self._record()
        speaking = [
            request_id
            for request_id, (new, _) in self.requests.items()
            if new.prompt_token_ids[-1] != SILENT
        ]
        return [self._advance(request_id) for request_id in speaking]

    def _record(self):
        self.num_steps += 1
        rows, now = len(self.requests), time.monotonic()
        times = (now - self.step_seconds, self.step_seconds, self.step_seconds)
        step = (*times, "decode", rows, rows, 0, rows, str(rows), "")
        self.step_log._records.append(StepRecord(self.num_steps, *step))

    def _advance(self, request_id):
        from kiln.engine.requests.request import TokenOutput

        new, count = self.requests[request_id]
        last = new.prompt_token_ids[-1]
        if last == CRASH:
            raise RuntimeError("the step broke")
        if last == LOSE:
            raise DeviceError("cuda:0 is lost")
        if last == DIE:
            os.kill(os.getpid(), 9)
        if last == FAIL_AT_ONCE or (last == FAIL and count == 20):
            del self.requests[request_id]
            return TokenOutput(request_id, [], "error", message="the step of this request broke")
        if last == HANG:
            time.sleep(600)
        if last == BURN:
            until = time.process_time() + 2
            while time.process_time() < until:
                pass
        if last == SLEEP:
            time.sleep(0.05)
        token = (last + 1 + count) % VOCABULARY
        self.requests[request_id][1] = count + 1
        limit = min(new.params.max_tokens or CONTEXT, CONTEXT - len(new.prompt_token_ids))
        reason = None
        if token in stop_token_ids(new, frozenset()):
            reason = "stop"
        elif count + 1 >= limit:
            reason = "length"
        if reason:
            del self.requests[request_id]
        return TokenOutput(request_id, [token], reason)


def load(config, progress):
    progress("loading", 0, 2)
    if config.model.model == MISSING_MODEL:
        raise ModelError("model 'missing': no such folder, and not a hub id")
    progress("loading", 2, 2)
    core = FakeCore(0.002, config.lora.modules)
    return core, ModelInfo(CONTEXT, VOCABULARY, "float32", "cpu", {"norm": "torch"})


def main(arguments):
    return run(load, arguments)
