"""The sections of gpu_check: functions, time limits, and whether they run concurrently."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Section:
    """A function from the arguments to rows. It runs in its own process.

    ``seconds``: the time limit. ``beside_others``: it times nothing, so it runs concurrently with
    others like it. ``shares``: processes that divide the items. ``ahead``: concurrent processes
    that first compile the code to be timed.
    """

    module: str
    function: str
    seconds: int
    beside_others: bool = False
    shares: int = 1
    ahead: int = 0


SECTIONS = {
    "kernel_parity": Section("gpu.kernels", "parity", 200, beside_others=True, shares=4),
    "host_equals_gpu": Section("gpu.agreement", "host_equals_gpu", 90, beside_others=True),
    "batch_invariance": Section("gpu.invariance", "batch_invariance", 90, beside_others=True),
    "sealed_bundle": Section("gpu.sealed", "sealed_bundle", 100, beside_others=True),
    "greedy_parity": Section("gpu.greedy", "parity", 90, beside_others=True),
    "late_load": Section("gpu.loading", "late_load", 60, beside_others=True),
    "memory_after_close": Section("gpu.closing", "memory_after_close", 100, beside_others=True),
    "kernel_builds": Section("gpu.builds", "builds", 60),
    "kernel_loading": Section("gpu.loading", "loading", 60),
    "kernel_launch": Section("gpu.kernels", "launch_overhead", 60),
    "kernel_timing": Section("gpu.kernels", "timing", 200),
    "decode_beside_copy": Section("gpu.beside_copy", "decode_beside_copy", 60),
    "sampling_steps": Section("gpu.sampling_steps", "sampling_steps", 70),
    "steps_ahead": Section("gpu.steps_ahead", "steps_ahead", 60),
    "lora_steps": Section("gpu.lora_steps", "lora_steps", 100),
    "all_reduce_rounds": Section("gpu.all_reduce", "rounds", 100),
    "all_reduce_latency": Section("gpu.all_reduce", "latency", 60),
    "all_reduce_ipc": Section("gpu.all_reduce_ipc", "ipc", 120, beside_others=True),
    "tensor_parallel": Section("gpu.engine_ranks", "tensor_parallel", 180),
    "against_compile": Section("gpu.compiled", "against_compile", 360, ahead=8),
}
# Sections of --gpus N, for several GPUs of one machine. Those behind tuned_plan use its plan.
SEVERAL_GPUS = {
    "links": Section("gpu.several", "links", 45),
    "bits": Section("gpu.several", "bits", 65),
    "rounds": Section("gpu.several", "rounds", 105),
    "skipped_call": Section("gpu.several", "skipped", 55),
    "tuned_plan": Section("gpu.several", "tuned", 105),
    "latency": Section("gpu.several", "latency", 95),
    "fused_norm": Section("gpu.several", "fused", 55),
}
ALL = {**SECTIONS, **SEVERAL_GPUS}
# Sections that run kernel by kernel; --kernels limits these.
BY_KERNEL = (
    "kernel_builds", "kernel_parity", "kernel_launch", "kernel_timing", "against_compile",
    "host_equals_gpu", "batch_invariance",
)  # fmt: skip
WHOLE = 780  # time limit of all sections in seconds; later sections are not measured
WHOLE_SEVERAL = 470  # the same with --gpus
