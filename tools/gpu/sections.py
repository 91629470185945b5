"""The sections of gpu_check: functions, time limits, and what each takes of the machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Section:
    """A function from the arguments to rows. It runs in its own process.

    ``seconds``: the time limit. ``usual``: the recorded seconds, by which parts are balanced.
    ``gib``: the GPU memory that it needs, in GiB, with that of the processes which it starts and
    0.5 to 0.75 for the CUDA context of each. ``beside_others``: it times nothing, so it runs at the
    same time as others like it, as far as there are memory and cores for them. ``cores``: the CPU
    cores that it then keeps busy. ``shares``: processes that divide the items; each of them needs
    ``gib`` and a core. ``ahead``: as many processes first compile the code to be timed.
    """

    module: str
    function: str
    seconds: int
    usual: int
    gib: float
    beside_others: bool = False
    cores: int = 1
    shares: int = 1
    ahead: int = 0


SECTIONS = {
    # The oracle of attention of 2,048 tokens over 10,240 holds 2.7 float64 tensors of 5 GiB.
    "kernel_parity": Section("gpu.kernels", "parity", 200, 140, 15, True, shares=4),
    # Test sizes alone; the host compiler runs up to eight times at once.
    "host_equals_gpu": Section("gpu.agreement", "host_equals_gpu", 90, 54, 3, True, cores=8),
    "batch_invariance": Section("gpu.invariance", "batch_invariance", 90, 28, 4, True),
    "sealed_bundle": Section("gpu.sealed", "sealed_bundle", 100, 13, 4, True, cores=2),
    # Tiny models, in transformers and in an engine with its graphs and cuBLAS workspaces.
    "greedy_parity": Section("gpu.greedy", "parity", 150, 60, 4, True, cores=2),
    "late_load": Section("gpu.loading", "late_load", 60, 11, 1, True),
    # A KV pool of 1.2 GiB, and graphs.
    "memory_after_close": Section("gpu.closing", "memory_after_close", 100, 26, 4, True),
    "kernel_builds": Section("gpu.builds", "builds", 60, 12, 1),
    "kernel_loading": Section("gpu.loading", "loading", 60, 10, 1),
    "kernel_launch": Section("gpu.kernels", "launch_overhead", 60, 23, 4),
    # Attention over 2 GiB of keys and values, two copies of them, and what torch gathers of both;
    # torch keeps what other cases have freed.
    "kernel_timing": Section("gpu.kernels", "timing", 200, 179, 52),
    "decode_beside_copy": Section("gpu.beside_copy", "decode_beside_copy", 60, 12, 7),
    "sampling_steps": Section("gpu.sampling_steps", "sampling_steps", 70, 19, 3),
    # 1.2 GiB of weights, small pools, and graphs.
    "steps_ahead": Section("gpu.steps_ahead", "steps_ahead", 60, 15, 5),
    # An 8B, whole and for one rank, each in two copies that are compared; 16 GB of files.
    "weight_loading": Section("gpu.weight_loading", "weight_loading", 150, 45, 36, cores=8),
    # An 8B: 15 GiB of weights, 14 of keys and values, 5 of 64 adapters, steps of 4,096 tokens.
    "lora_steps": Section("gpu.lora_steps", "lora_steps", 100, 56, 46),
    "all_reduce_rounds": Section("gpu.all_reduce", "rounds", 100, 46, 2),
    "all_reduce_latency": Section("gpu.all_reduce", "latency", 60, 9, 2),
    # 0.5 GiB of weights at a time, in copies, and 2.5 to make them from floats.
    "few_row_products": Section("gpu.few_rows", "products", 70, 35, 6),
    "more_row_products": Section("gpu.more_rows", "products", 100, 30, 6),
    # 0.8 GiB of weights; few experts are made at a time.
    "expert_products": Section("gpu.expert_rows", "products", 55, 20, 4),
    "quantised_products": Section("gpu.quantised", "products", 100, 31, 6),
    # Up to four ranks, each with a context and small buffers.
    "all_reduce_ipc": Section("gpu.all_reduce_ipc", "ipc", 120, 50, 6, True, cores=4),
    # Up to five engines at once, of two to four ranks with tiny models; NCCL's buffers.
    "tensor_parallel": Section("gpu.engine_ranks", "tensor_parallel", 180, 174, 24),
    # A call on 0.7 GiB with its outputs, and torch.compile's.
    "against_compile": Section("gpu.compiled", "against_compile", 360, 109, 7, ahead=8),
}
# Sections of --gpus N, for several GPUs of one machine; their memory is that of each GPU. Those
# behind tuned_plan use its plan.
SEVERAL_GPUS = {
    "links": Section("gpu.several", "links", 45, 13, 3),
    "bits": Section("gpu.several", "bits", 65, 17, 3),
    "rounds": Section("gpu.several", "rounds", 105, 21, 3),
    "skipped_call": Section("gpu.several", "skipped", 55, 21, 3),
    "tuned_plan": Section("gpu.several", "tuned", 105, 30, 3),
    "latency": Section("gpu.several", "latency", 95, 26, 3),
    "fused_norm": Section("gpu.several", "fused", 55, 16, 3),
}
ALL = {**SECTIONS, **SEVERAL_GPUS}
# Sections that run kernel by kernel; --kernels limits these.
BY_KERNEL = (
    "kernel_builds", "kernel_parity", "kernel_launch", "kernel_timing", "against_compile",
    "host_equals_gpu", "batch_invariance",
)  # fmt: skip
WHOLE = 1250  # time limit of all sections in seconds; later sections are not measured
WHOLE_SEVERAL = 470  # the same with --gpus
WHOLE_PART = 560  # the same of a part, so that a call ends within ten minutes
