"""The order in which codes of 4 bits are kept, so that tensor cores can take them as they are.

A row is padded with zeros to a multiple of 128 codes. Each 128 are 16 words of 32 bits. Word 4 t +
j holds the codes 32 j + 8 t and the seven behind it. A thread t of four that share a row loads its
four words as one vector, and word j belongs to the j-th group of 32 inputs. Within a word, the
codes 2 p and 2 p + 1 are in the bits 4 p and 4 p + 16, so that one shift and one mask give a pair.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

CHUNK = 128  # codes


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Return codes [.., in] uint8, below 16, as [.., padded in / 2] uint8."""
    *lead, inputs = codes.shape
    codes = F.pad(codes, (0, -inputs % CHUNK))
    words = codes.view(
        *lead, codes.shape[-1] // CHUNK, 4, 4, 4, 2
    )  # of a chunk: j, t, p, and which one of a pair
    ordered = words.transpose(-4, -3).transpose(-2, -1).flatten(-5)
    return ordered[..., ::2] | ordered[..., 1::2] << 4


def unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """Return the codes [.., padded in] uint8 of what ``pack_codes`` gave."""
    ordered = torch.stack((packed & 15, packed >> 4), dim=-1)
    words = ordered.view(*packed.shape[:-1], 2 * packed.shape[-1] // CHUNK, 4, 4, 2, 4)
    return words.transpose(-4, -3).transpose(-2, -1).flatten(-5)
