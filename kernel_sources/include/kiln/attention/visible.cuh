// Which keys a row of attention sees: those before its end, and none before the first visible one.
#pragma once
#include "kiln/ptx/ptx.cuh"

namespace kiln {

// First visible key of the row at position end - 1. window w above 0: the row sees its last w keys;
// -c: those of its own chunk, where chunks of c keys begin at multiples of c; 0: all. It never falls
// as `end` rises.
KILN_FN int first_visible(int end, int window) {
  if (window >= 0) return window ? max(0, end - window) : 0;
  const int position = max(0, end - 1);
  return position - int(unsigned(position) % unsigned(-window));
}

}  // namespace kiln
