// Asynchronous copies to shared memory, and the matrix operations of a warp.
#include <string.h>

#include "runtime.h"

namespace cuda_host {

static void land(Copy& c) {
  if (run.check) check(c.to, c.bytes, Kind::write, -1, c.pc);
  if (c.landed) return;
  if (run.check && c.valid) check(c.from, c.bytes, Kind::read, -1, c.pc);
  if (c.valid) memcpy(c.to, c.from, c.bytes);
  else memset(c.to, 0, c.bytes);
}

void copy_async(void* to, const void* from, int bytes, bool valid, Site site) {
  Fiber& f = *current;
  const void* pc = __builtin_return_address(0);
  const auto n = unsigned(bytes);
  f.site = site;
  if (uintptr_t(to) % n || (valid && uintptr_t(from) % n))
    fail(format("misaligned %d-byte cp.async by %s", bytes, where(f).c_str()));
  Copy copy{static_cast<char*>(to), static_cast<const char*>(from), n, f.group, valid, false, pc};
  if (run.check) {
    if (valid) check(from, n, Kind::read, -1, pc);
    if (!check(to, n, Kind::write, -1, pc))
      fail(format("cp.async to memory that is not shared by %s", where(f).c_str()));
  }
  memset(to, kPoison, n);
  if (run.seed && random_bits() % 4 == 0) {
    if (valid) memcpy(to, from, n);
    else memset(to, 0, n);
    copy.landed = true;
  }
  if (run.check) mark_uninitialised(to, n);
  f.copies.push_back(copy);
}

void copy_commit() { current->group++; }

void copy_wait(int pending) {
  Fiber& f = *current;
  size_t kept = 0;
  for (Copy& c : f.copies) {
    if (c.group + unsigned(pending) < f.group) land(c);
    else f.copies[kept++] = c;
  }
  f.copies.resize(kept);
}

void check_row(const void* pc) {
  const void* row = *static_cast<void**>(current->data);
  if (uintptr_t(row) % 16)
    fail(format("misaligned row %p of an ldmatrix by %s", row, where(*current).c_str()));
  if (run.check && !check(row, 16, Kind::read, -1, pc))
    fail(format("ldmatrix from memory that is not shared by %s", where(*current).c_str()));
}

static void load_matrix(bool trans, Fiber* lanes) {
  uint16_t tile[32][8];
  for (int i = 0; i < 32; i++) memcpy(tile[i], *static_cast<void**>(lanes[i].data), 16);
  for (int i = 0; i < 32; i++) {
    auto* out = static_cast<uint16_t*>(lanes[i].data);
    for (int j = 0; j < 8; j++) {
      const int row = i / 4, column = i % 4 * 2 + j % 2;
      out[j] = trans ? tile[j / 2 * 8 + column][row] : tile[j / 2 * 8 + row][column];
    }
  }
}

float widen(uint16_t x, bool bf16) {
  if (bf16) return unbits<float>(uint64_t(x) << 16);
  const uint32_t e = x >> 10 & 31, m = x & 1023, s = uint32_t(x & 0x8000) << 16;
  if (e == 0) return (s ? -0x1p-24f : 0x1p-24f) * float(m);
  return unbits<float>(s | (e == 31 ? 255 : e + 112) << 23 | m << 13);
}

// D (16 x 8) += A (16 x 16) B (16 x 8), in the fragments of the PTX manual. Products are exact;
// each sum is rounded to float32, in the order of k. A GPU may round differently.
static void mma(bool bf16, Fiber* lanes) {
  float a[16][16], b[16][8], d[16][8];
  for (int i = 0; i < 32; i++) {
    const auto& io = *static_cast<const MmaOperands*>(lanes[i].data);
    const int g = i / 4, t = i % 4 * 2;
    for (int half = 0; half < 2; half++) {
      for (int r = 0; r < 4; r++)
        a[g + r % 2 * 8][t + r / 2 * 8 + half] = widen(uint16_t(io.a[r] >> half * 16), bf16);
      for (int r = 0; r < 2; r++)
        b[t + r * 8 + half][g] = widen(uint16_t(io.b[r] >> half * 16), bf16);
      for (int r = 0; r < 2; r++) d[g + r * 8][t + half] = io.d[r * 2 + half];
    }
  }
  for (int row = 0; row < 16; row++)
    for (int k = 0; k < 16; k++)
      for (int column = 0; column < 8; column++) d[row][column] += a[row][k] * b[k][column];
  for (int i = 0; i < 32; i++) {
    auto& io = *static_cast<MmaOperands*>(lanes[i].data);
    for (int r = 0; r < 4; r++) io.d[r] = d[i / 4 + r / 2 * 8][i % 4 * 2 + r % 2];
  }
}

void matrix_operation(WarpOp op, Fiber* lanes) {
  if (op == warp_wgmma || op == warp_wgmma_wait) return multiply_for_group(op, lanes);
  if (op == warp_mma_bf16 || op == warp_mma_fp16) mma(op == warp_mma_bf16, lanes);
  else load_matrix(op == warp_ldmatrix_trans, lanes);
}

}  // namespace cuda_host
