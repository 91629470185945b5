"""How decode attention is cut into work items: the host's side of ``kiln/attention/split.cuh``.

A split depends on its own request and on constants of the machine, never on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from kiln.jit_kernels.spec import Gpu, Variant

KV_BLOCK = 16  # tokens of a block of the pool
PAIR_BLOCKS = 2  # that a warp takes at a time
TILE_ROWS = 16  # (token, head of the group) rows of an mma tile
MOST_TOKENS = 16  # a request with more query tokens in a step is prefill's
NODE_SPLITS = 8  # splits of a divisible request that are merged first
HEAD_TILES = (64, 128, 256)  # head_dim, rounded up: the kernels' shapes at compile time
MOST_GROUP = 255  # heads of a group that the kernels' division holds for
_SPLIT_BLOCKS = 64  # of one-byte elements, half of two-byte ones: less is not worth a merge
_FEW_SPLITS = 2
_LONG_SPLIT = 128  # blocks that each must have, of more splits than these few
_RESERVED = 1024  # bytes of shared memory that the driver keeps of each block
_STATIC = 1536  # bytes, more than the kernel's own shared variables
_STAGES = 106 * 1024  # bytes of stages that leave room for two blocks on Hopper
_FEWER_STAGES = 70 * 1024  # where a multiprocessor has less: for two, or one
FIRST_IDS = 8  # blocks of a split whose ids stand in its work item
ITEM_INTS = 8 + FIRST_IDS
SCALE_ROOM = 8  # floats after the columns of a partial result: its scale, up to 32 bytes
UNSENT = -1  # a word of a message that has not come
_REGISTER_BLOCKS = 2  # resident blocks that the registers of a multiprocessor allow


class Part(IntEnum):
    """What a work item is: a split, and whether that has units; or half or a quarter of one."""

    SPLIT = 0
    SPLIT_IN_UNITS = 1
    HALF = 2
    QUARTER = 3

    @property
    def halvings(self) -> int:
        """How many times a split was halved to be such an item."""
        return max(0, self - Part.SPLIT_IN_UNITS)


@dataclass(frozen=True, slots=True)
class SplitRule:
    """Up to ``few`` splits of a request, one for each ``blocks`` blocks; then ever twice as many.

    That is as long as each has ``longer`` times that, and no more than ``most`` come of it.
    ``most`` items fill the machine: also the most that all tiles of a request have. So as many
    divisible requests of one length as are a power of two have items that fill it, or nearly, where
    they have ``most`` times ``blocks`` blocks in all.

    A split has as many shares as a block has warps, and a share as many units; splits, shares and
    units are added up as a binary tree. Where no more than ``most`` items come of it, quarters of
    the splits of requests that are divisible are items, or halves; else the splits are. The order
    of additions is the same, and looks at nothing but the request.
    """

    most: int
    blocks: int
    few: int = _FEW_SPLITS
    longer: int = 4
    warp_bits: int = 2  # a block has 2 ** warp_bits warps

    def splits(self, num_blocks: int) -> int:
        """Return how many splits a request of so many blocks would have, were there no ``most``."""
        pieces = -(-num_blocks // self.blocks)
        if pieces <= self.few:
            return pieces
        splits = self.few
        while splits * 2 * self.longer <= pieces and splits * 2 <= self.most:
            splits *= 2
        return splits


def head_tile(head_dim: int) -> int:
    """Return what head_dim is rounded up to; itself where no kernel comes for it."""
    tile = next((tile for tile in HEAD_TILES if head_dim <= tile), head_dim)
    return head_dim if head_dim % 16 else tile


def comes(variant: Variant) -> bool:
    """Return whether there is a variant: those that models need, as each is built for all targets.

    Of bf16 all but a pool of e4m3 for head_dim above 128; fp16 has neither of the two.
    """
    plain, narrow = variant["kv_t"] == "SCALAR_T", variant["head_tile"] != "256"
    return plain and narrow if variant["scalar_t"] == "kiln::fp16" else plain or narrow


@dataclass(frozen=True, slots=True)
class Shape:
    """What the kernel's shared memory depends on. Units: elements, bytes an element."""

    head_tile: int
    kv_bytes: int

    @property
    def warp_bits(self) -> int:
        """Warps of a block, as a power of two."""
        return 2 if self.head_tile <= 128 else 1

    @property
    def warps(self) -> int:
        """Warps of a block."""
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
        """Return how many blocks a KV head has: an even number, as they come in pairs."""
        return max(1, self.resident_blocks(gpu) // num_kv_heads // 2) * 2


def split_rule(shape: Shape, num_kv_heads: int, gpu: Gpu) -> SplitRule:
    """Return the rule of a machine."""
    blocks = _SPLIT_BLOCKS // shape.kv_bytes
    return SplitRule(
        most=min(shape.places(num_kv_heads, gpu), 2**15),
        blocks=blocks,
        longer=_LONG_SPLIT // blocks,
        warp_bits=shape.warp_bits,
    )


@dataclass(frozen=True, slots=True)
class Cut:
    """One request's work: its blocks that any of its tokens sees, its tiles and splits."""

    first_block: int
    num_blocks: int
    num_tiles: int  # 0: nothing to do
    num_splits: int
    divisible: bool  # its shares have units

    def begin(self, split: int) -> int:
        """Return where a split begins, in blocks of the request: all but the last are even."""
        pairs = -(-self.num_blocks // PAIR_BLOCKS)
        return self.first_block + min(
            self.num_blocks, split * pairs // self.num_splits * PAIR_BLOCKS
        )


def cut(rule: SplitRule, num_tokens: int, seq_len: int, group: int, window: int) -> Cut:
    """Return how a request of ``num_tokens`` queries and ``seq_len`` keys is cut up."""
    first = max(0, seq_len - num_tokens + 1 - window) // KV_BLOCK if window else 0
    blocks = -(-seq_len // KV_BLOCK) - first
    tiles = -(-num_tokens * group // TILE_ROWS) if num_tokens <= MOST_TOKENS else 0
    most = max(1, rule.most // max(1, tiles))
    splits = max(1, min(rule.splits(blocks), most))
    shares = splits << rule.warp_bits
    divisible = (
        num_tokens * group <= TILE_ROWS // 2
        and (splits <= NODE_SPLITS or splits % NODE_SPLITS == 0)
        and blocks >= (shares << rule.warp_bits) * PAIR_BLOCKS
    )
    return Cut(first, blocks, tiles, splits, divisible)


def unit_begin(unit: int, num_pairs: int, warp_bits: int) -> int:
    """Return where a unit of a split of so many pairs of blocks begins, in pairs."""
    return unit * num_pairs >> 2 * warp_bits


def first_unit(kind: Part, part: int, warp: int, warp_bits: int) -> int:
    """Return which unit of its split a warp begins with."""
    own = part % (1 << kind.halvings) << (2 * warp_bits - kind.halvings)
    return own + (warp << (warp_bits - kind.halvings))


def halvings(rule: SplitRule, cuts: Sequence[Cut]) -> int:
    """Return how many times the splits of a step's divisible requests are halved."""
    once = sum(one.num_tiles * one.num_splits for one in cuts)
    more = sum(one.num_splits for one in cuts if one.divisible and one.num_tiles)
    times = range(rule.warp_bits, 0, -1)
    return next((n for n in times if once + ((1 << n) - 1) * more <= rule.most), 0)


def most_items(
    rule: SplitRule, num_requests: int, num_tokens: int, max_blocks: int, group: int
) -> int:
    """Return the most work items, of one KV head, that a step of these shapes can have."""
    splits = max(1, min(rule.most, rule.splits(max_blocks)))
    queries = min(num_tokens, MOST_TOKENS * num_requests)
    tiles = min(num_requests, num_tokens) + queries * group // TILE_ROWS
    undivided = min(tiles * splits, num_requests * max(rule.most, group))
    return max(undivided, min(undivided << rule.warp_bits, rule.most))


def most_rows(
    rule: SplitRule, num_requests: int, num_tokens: int, max_blocks: int, group: int
) -> int:
    """Return the most rows of partial results, of one KV head, that such a step can have."""
    splits = min(rule.most, rule.splits(max_blocks))
    queries = min(num_tokens, MOST_TOKENS * num_requests)
    undivided = min(queries * group * splits, num_requests * TILE_ROWS * rule.most)
    shares = max(splits, 1) << rule.warp_bits
    divided = min(queries * group * shares, TILE_ROWS * rule.most)
    divisible = group <= TILE_ROWS // 2 and max_blocks >= PAIR_BLOCKS << 2 * rule.warp_bits
    return max(undivided if splits > 1 else 0, divided if divisible else 0)
