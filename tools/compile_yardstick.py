"""A fixed CUDA program whose compile time is the unit for other compile times.

Compile times depend on the machine and its load; ratios of compile times depend on them far less.
The program must not change, because ``benchmarks/compile.json`` records its time with the others.
"""

from __future__ import annotations

import time

from kiln.jit_kernels.toolchains.nvrtc import compile_cubin
from kiln.jit_kernels.toolchains.template import Unit

_ARCH = "sm_80"
_TEXT = """
template <int N> struct Sum {
  static __device__ float of(const float (&x)[N]) {
    float part[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) part[i] = __fmaf_rn(x[2 * i], 0.5f, x[2 * i + 1]);
    return Sum<N / 2>::of(part);
  }
};
template <> struct Sum<1> {
  static __device__ float of(const float (&x)[1]) { return x[0]; }
};
template <int N> __device__ void step(const float* in, float* out, int rows, float* shared) {
  float x[N];
  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      int at = row * 4099 + i * blockDim.x + threadIdx.x;
      x[i] = at % 3 == 0 ? in[at] : __expf(in[at / 2]);
    }
    float sum = Sum<N>::of(x);
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
    shared[threadIdx.x / 32] = sum;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; ++i) out[row * N + i] = x[i] * rsqrtf(shared[i % 8]) + sum;
    __syncthreads();
  }
}
extern "C" __global__ void yardstick(const float* in, float* out, int rows) {
  __shared__ float shared[32];
  step<16>(in, out, rows, shared);
  step<8>(in, out, rows, shared);
}
"""


def yardstick_seconds() -> float:
    """Compile the program once; return the CPU seconds of this thread. Raises CompileError."""
    start = time.thread_time()
    compile_cubin("yardstick", Unit("yardstick.cu", _TEXT, {}), _ARCH)
    return time.thread_time() - start
