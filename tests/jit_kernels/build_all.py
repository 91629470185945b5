"""Build every kernel for one target in a new process; print keys and digests as JSON.

The second argument may be a user id. The process switches to it after loading NVRTC, because that
user may be unable to read Python's files in another user's home. Or it is --one-of-each, to build
one variant of each of the kernels named after it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys

import kiln
from kiln.cache.disk.store import Store
from kiln.jit_kernels.compile.kernel_cache import KernelCache
from kiln.jit_kernels.compile.warmup import jobs_for, warm_up
from kiln.jit_kernels.registry import all_specs
from kiln.jit_kernels.toolchains import nvrtc
from kiln.jit_kernels.toolchains.template import render

if __name__ == "__main__":
    jobs = jobs_for(all_specs().values(), [sys.argv[1]])
    if "--one-of-each" in sys.argv:
        jobs = list({job.spec.name: job for job in jobs if job.spec.name in sys.argv}.values())
    elif len(sys.argv) > 2:
        nvrtc.version(), nvrtc.identity(), render(jobs[0].spec, jobs[0].variant)
        os.setgroups([])
        os.setgid(int(sys.argv[2]))
        os.setuid(int(sys.argv[2]))
    outcomes, _ = warm_up(jobs, KernelCache(Store(None, mode="off")))
    built = {one.job.name: one.built for one in outcomes}
    digests = {name: [b.key, hashlib.sha256(b.cubin).hexdigest()] for name, b in built.items()}
    print(json.dumps({"root": kiln.__path__[0], "user": os.getuid(), "built": digests}))
