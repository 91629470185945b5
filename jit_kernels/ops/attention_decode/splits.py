"""How decode attention is cut into work items: the host's side of ``kiln/attention/split.cuh``.

A split depends only on its request and on constants of the GPU, never on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from kiln.jit_kernels.declare.spec import Gpu
from kiln.jit_kernels.ops.attention.variants import KV_BLOCK, MOST_TOKENS
from kiln.jit_kernels.ops.attention.visible import first_visible

PAIR_BLOCKS = 2  # KV blocks that a warp processes at a time
TILE_ROWS = 16  # (token, query head of the group) rows of an mma tile
NODE_SPLITS = 8  # splits of a divisible request that are merged first
_SPLIT_BLOCKS = 64  # for one-byte KV, half for two-byte KV: smaller splits do not pay
_FEW_SPLITS = 2
_LONG_SPLIT = 128  # minimum blocks of a split in requests with more splits than that
_RESERVED = 1024  # bytes of shared memory that the driver reserves in each block
_STATIC = 1536  # bytes, above those of the kernel's static shared variables
_STAGES = 106 * 1024  # bytes of stages with which two blocks fit in a Hopper multiprocessor
_FEWER_STAGES = 70 * 1024  # for GPUs with less shared memory: one or two blocks fit
FIRST_IDS = 8  # block ids that a work item holds
ITEM_INTS = 8 + FIRST_IDS
SCALE_ROOM = 8  # floats after the columns of a partial result: its scale, padded to 32 bytes
UNSENT = -1  # marks a word of a message that has not arrived
_REGISTER_BLOCKS = 2  # blocks for which a multiprocessor has enough registers


class Part(IntEnum):
    """The kind of a work item: a split, with or without units, or half or a quarter of a split."""

    SPLIT = 0
    SPLIT_IN_UNITS = 1
    HALF = 2
    QUARTER = 3

    @property
    def halvings(self) -> int:
        """How often a split was halved to get such an item."""
        return max(0, self - Part.SPLIT_IN_UNITS)


@dataclass(frozen=True, slots=True)
class SplitRule:
    """The rule for the number of splits of a request: one per ``blocks`` blocks, up to ``few``.

    In longer requests the number doubles while each split keeps ``longer`` times ``blocks`` blocks,
    up to ``most`` splits. ``most`` work items fill the GPU, and the tiles of a request together
    have at most that many. So a power-of-two number of equally long divisible requests nearly fills
    the GPU if together they have ``most`` times ``blocks`` blocks.

    A split has one share for each warp of a block, and a share has as many units. Splits, shares
    and units are merged as a binary tree. The splits of divisible requests are cut into quarters if
    the step then has at most ``most`` items, else into halves under the same condition; each is a
    work item. That does not change the order of additions, which depends on the request alone.
    """

    most: int
    blocks: int
    few: int = _FEW_SPLITS
    longer: int = 4
    warp_bits: int = 2  # a block has 2 ** warp_bits warps

    def arguments(self) -> dict[str, int]:
        """Return the rule as arguments of attention_plan, by name."""
        return {
            "max_splits": self.most,
            "split_blocks": self.blocks,
            "few_splits": self.few,
            "longer": self.longer,
            "warp_bits": self.warp_bits,
        }

    def splits(self, num_blocks: int) -> int:
        """Return the number of splits of a request, before the limit for all its tiles."""
        pieces = -(-num_blocks // self.blocks)
        if pieces <= self.few:
            return pieces
        splits = self.few
        while splits * 2 * self.longer <= pieces and splits * 2 <= self.most:
            splits *= 2
        return splits


def is_decode(num_tokens: int) -> bool:
    """Return whether decode attention serves a request with this many query tokens."""
    return num_tokens <= MOST_TOKENS


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes that determine the kernel's shared memory. Units: elements, bytes per element."""

    head_tile: int
    kv_bytes: int

    @property
    def warp_bits(self) -> int:
        """log2 of the number of warps per block."""
        return 2 if self.head_tile <= 128 else 1

    @property
    def warps(self) -> int:
        """The number of warps per block."""
        return 1 << self.warp_bits

    def shared_bytes(self, gpu: Gpu) -> int:
        """Return the bytes of dynamic shared memory: the warps' stages and the queries."""
        half = PAIR_BLOCKS * KV_BLOCK * (self.head_tile * self.kv_bytes // 16 | 1) * 16
        stages = _STAGES if gpu.max_shared_bytes >= 2 * _STAGES else _FEWER_STAGES
        halves = stages // (self.warps * half)
        return self.warps * halves * half + TILE_ROWS * (self.head_tile // 8 | 1) * 16

    def resident_blocks(self, gpu: Gpu) -> int:
        """Return how many blocks run on a GPU at once."""
        a_block = self.shared_bytes(gpu) + _STATIC + _RESERVED
        room = (gpu.max_shared_bytes + _RESERVED) // a_block
        return gpu.num_multiprocessors * max(1, min(room, _REGISTER_BLOCKS))

    def places(self, num_kv_heads: int, gpu: Gpu) -> int:
        """Return the number of blocks per KV head: an even number, because blocks run in pairs."""
        return max(1, self.resident_blocks(gpu) // num_kv_heads // 2) * 2


def split_rule(shape: Shape, num_kv_heads: int, gpu: Gpu) -> SplitRule:
    """Return the split rule for a GPU."""
    blocks = _SPLIT_BLOCKS // shape.kv_bytes
    return SplitRule(
        most=min(shape.places(num_kv_heads, gpu), 2**15),
        blocks=blocks,
        longer=_LONG_SPLIT // blocks,
        warp_bits=shape.warp_bits,
    )


@dataclass(frozen=True, slots=True)
class Cut:
    """One request's work: the blocks that any of its tokens sees, its tiles and its splits."""

    first_block: int
    num_blocks: int
    num_tiles: int  # 0: nothing to do
    num_splits: int
    divisible: bool  # its shares have units

    def equal_but_for_the_end(self, other: Cut) -> bool:
        """Return whether another request has the same splits, but for the last one's end."""
        if (self.num_splits, self.divisible) != (other.num_splits, other.divisible):
            return False
        return all(self.begin(i) == other.begin(i) for i in range(self.num_splits))

    def begin(self, split: int) -> int:
        """Return the first block of a split; all splits but the last hold whole pairs of blocks."""
        pairs = -(-self.num_blocks // PAIR_BLOCKS)
        return self.first_block + min(
            self.num_blocks, split * pairs // self.num_splits * PAIR_BLOCKS
        )


def cut(rule: SplitRule, num_tokens: int, seq_len: int, group: int, window: int) -> Cut:
    """Cut a request of ``num_tokens`` queries and ``seq_len`` keys into work."""
    first = max(0, first_visible(seq_len - num_tokens + 1, window)) // KV_BLOCK
    blocks = -(-seq_len // KV_BLOCK) - first
    tiles = -(-num_tokens * group // TILE_ROWS) if is_decode(num_tokens) else 0
    most = max(1, rule.most // max(1, tiles))
    splits = max(1, min(rule.splits(blocks), most))
    shares = splits << rule.warp_bits
    divisible = (
        num_tokens * group <= TILE_ROWS // 2
        and (splits <= NODE_SPLITS or splits % NODE_SPLITS == 0)
        and blocks >= (shares << rule.warp_bits) * PAIR_BLOCKS
    )
    return Cut(first, blocks, tiles, splits, divisible)


def groups(
    rule: SplitRule,
    cuts: Sequence[Cut],
    tokens: Sequence[int],
    shared: Sequence[int],
    group: int,
) -> list[range]:
    """Return the requests of a step without a window, as runs that share splits.

    ``shared``: how many first blocks a request has in common with the one before it. A run shares
    all splits but the last, which have one work item each. A run has at most 8 rows, and does not
    cross a multiple of its greatest length. Nothing is shared if the step's items fit the GPU.
    """
    most = max(1, TILE_ROWS // 2 // group)
    full = sum(one.num_tiles * one.num_splits for one in cuts) > rule.most
    runs: list[range] = []
    for r, one in enumerate(cuts):
        joins = full and r % most and tokens[r] == tokens[r - 1] == 1 and one.num_splits > 1
        if joins and one.equal_but_for_the_end(cuts[r - 1]):
            joins = shared[r] >= one.begin(one.num_splits - 1)
        else:
            joins = False
        runs.append(range(runs.pop().start if joins else r, r + 1))
    return runs


def unit_begin(unit: int, num_pairs: int, warp_bits: int) -> int:
    """Return the first pair of blocks of a unit, in a split of ``num_pairs`` pairs."""
    return unit * num_pairs >> 2 * warp_bits


def first_unit(kind: Part, part: int, warp: int, warp_bits: int) -> int:
    """Return the first unit of a warp, counted in its split."""
    own = part % (1 << kind.halvings) << (2 * warp_bits - kind.halvings)
    return own + (warp << (warp_bits - kind.halvings))


def halvings(rule: SplitRule, cuts: Sequence[Cut]) -> int:
    """Return how often the splits of a step's divisible requests are halved."""
    once = sum(one.num_tiles * one.num_splits for one in cuts)
    more = sum(one.num_splits for one in cuts if one.divisible and one.num_tiles)
    times = range(rule.warp_bits, 0, -1)
    return next((n for n in times if once + ((1 << n) - 1) * more <= rule.most), 0)


def most_items(
    rule: SplitRule, num_requests: int, num_tokens: int, max_blocks: int, group: int
) -> int:
    """Return the maximum number of work items per KV head in a step of these sizes."""
    splits = max(1, min(rule.most, rule.splits(max_blocks)))
    queries = min(num_tokens, MOST_TOKENS * num_requests)
    tiles = min(num_requests, num_tokens) + queries * group // TILE_ROWS
    undivided = min(tiles * splits, num_requests * max(rule.most, group))
    return max(undivided, min(undivided << rule.warp_bits, rule.most))


def most_rows(
    rule: SplitRule, num_requests: int, num_tokens: int, max_blocks: int, group: int
) -> int:
    """Return the maximum number of partial result rows per KV head in a step of these sizes."""
    splits = min(rule.most, rule.splits(max_blocks))
    queries = min(num_tokens, MOST_TOKENS * num_requests)
    undivided = min(queries * group * splits, num_requests * TILE_ROWS * rule.most)
    shares = max(splits, 1) << rule.warp_bits
    divided = min(queries * group * shares, TILE_ROWS * rule.most)
    divisible = group <= TILE_ROWS // 2 and max_blocks >= PAIR_BLOCKS << 2 * rule.warp_bits
    return max(undivided if splits > 1 else 0, divided if divisible else 0)
