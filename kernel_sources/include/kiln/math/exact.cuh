// Functions that give the same bits on every GPU and on the host.
#pragma once
#include "kiln/ptx/ptx.cuh"

namespace kiln {

// 2^(exponent - 127), for an exponent from 0 to 254; 2^-127 is subnormal.
KILN_FN float power_of_two(uint32_t exponent) {
  return as_float(exponent ? exponent << 23 : 1u << 22);
}

// 2^x for x <= 1; below -126 the result is 2^-126. Relative error below 8e-8.
KILN_FN float exp2_exact(float x) {
  x = x > -126.0f ? x : -126.0f;
  const float shifted = add_rn(x, 12582912.0f);  // 1.5 * 2^23: rounds to an integer
  const float f = sub_rn(x, sub_rn(shifted, 12582912.0f));
  float p = 1.5353361959569156e-4f;
  p = fma_rn(p, f, 1.3398875016719103e-3f);
  p = fma_rn(p, f, 9.61843691766262e-3f);
  p = fma_rn(p, f, 5.5503323674201965e-2f);
  p = fma_rn(p, f, 2.4022647738456726e-1f);
  p = fma_rn(p, f, 6.931471824645996e-1f);
  p = fma_rn(p, f, 1.0f);
  return as_float(as_uint(p) + (as_uint(shifted) << 23));
}

}  // namespace kiln
