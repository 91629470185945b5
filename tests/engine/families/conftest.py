"""Tiny models of every family on disk."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from tiny.model import all_tiny


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Return a function from the name of a tiny model to its folder and its logits."""

    @cache
    def make(name):
        one, folder = all_tiny()[name], tmp_path_factory.mktemp(name)
        model = one.save(folder)

        def logits(token_ids, total):
            with torch.inference_mode():
                return one.logits(model, token_ids, total)

        return folder, logits

    return make
