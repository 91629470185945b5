"""Which tokens a request may draw: those it allows, without those that would end a bad word."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch

from kiln.engine.requests.batch import ScheduledRequest
from kiln.engine.requests.late_masks import Mask
from kiln.engine.requests.sampling_params import SamplingParams
from kiln.engine.runner.edits import History, to_device
from kiln.jit_kernels.ops.edits.functions import ban_words

_ALL = -1  # 32 tokens that are allowed


class Masks:
    """Makes the masks of steps. What a request allows is sent to the device once."""

    def __init__(self, history: History) -> None:
        self.history = history
        # By row: the settings of its request, and the tokens that they allow, one bit each.
        self._allowed: dict[int, tuple[SamplingParams, torch.Tensor]] = {}

    def of(
        self,
        requests: Sequence[ScheduledRequest],
        lengths: torch.Tensor,
        vocab: int,
        late: Sequence[Mask | None] = (),
    ) -> torch.Tensor | None:
        """Return the mask of rows of logits, [rows, ceil(vocab / 32)] int32; see ``edits_of``.

        ``late``: what each row may draw besides. Returns None if every row may draw any token.
        """
        limited = [
            (index, request)
            for index, request in enumerate(requests)
            if request.params.allowed_token_ids or request.params.bad_words_token_ids
        ]
        if not limited and not any(late):
            return None
        num_words, device = -(-vocab // 32), self.history.tables.device
        own = {index: bits for index, bits in enumerate(late) if bits is not None}
        if len(own) == len(requests):
            mask = self._sent(own.values(), num_words)
        else:
            mask = torch.full((len(requests), num_words), _ALL, dtype=torch.int32, device=device)
            if own:
                (places,) = to_device([torch.tensor([*own], dtype=torch.int32)], device)
                mask.index_copy_(0, places.long(), self._sent(own.values(), num_words))
        words: list[tuple[int, ...]] = []
        tokens: list[int] = []
        for index, request in limited:
            if request.params.allowed_token_ids:
                mask[index] &= self._bits(request, mask.shape[1])
            for word in request.params.bad_words_token_ids or ():
                words.append((index, request.row, len(tokens), len(word)))
                tokens += word
        if words:
            parts = [torch.tensor(one, dtype=torch.int32) for one in (words, tokens)]
            words_there, tokens_there = to_device(parts, mask.device)
            ban_words(
                mask,
                words_there,
                lengths,
                tokens_there,
                token_pool=self.history.token_pool,
                tables=self.history.tables,
                block_size=self.history.block_size,
            )
        return mask

    def _sent(self, masks: Collection[Mask], num_words: int) -> torch.Tensor:
        """Begin to copy late masks to the device, [len(masks), num_words] int32."""
        device = self.history.tables.device
        # Torch gives pinned memory to nobody else before its copy has ended.
        pinned = device.type == "cuda"
        host = torch.empty(len(masks), num_words, dtype=torch.int32, pin_memory=pinned)
        rows = host.numpy()
        for row, bits in zip(rows, masks, strict=True):
            row[:] = np.frombuffer(bits, np.int32)
        return host.to(device, non_blocking=True)

    def _bits(self, request: ScheduledRequest, words: int) -> torch.Tensor:
        """Return the tokens that a request allows as a row of a mask."""
        known = self._allowed.get(request.row)
        if known is not None and known[0] is request.params:
            return known[1]
        bits = np.zeros(32 * words, np.bool_)
        bits[list(request.params.allowed_token_ids or ())] = True
        packed = torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))
        (row,) = to_device([packed], self.history.tables.device)
        self._allowed[request.row] = request.params, row
        return row
