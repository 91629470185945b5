"""Errors that cross processes keep their kind."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kiln.engine import errors
from kiln.engine.distributed.watch import Watch
from kiln.engine.process import wire
from kiln.engine.process.client import _failure

KINDS = {
    "ConfigError": errors.ConfigError,
    "ModelError": errors.ModelError,
    "AdapterError": errors.AdapterError,
    "PieceError": errors.PieceError,
    "SealedCacheError": errors.SealedCacheError,
    "SealedMiss": errors.SealedCacheError,
    "KernelError": errors.ConfigError,
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_loading_has_its_kind_from_the_engine_process(kind):
    error = _failure(wire.Failed("what was wrong", kind, expected=True), loading=True)
    assert (type(error), str(error)) == (KINDS[kind], "what was wrong")


@pytest.mark.parametrize("kind", KINDS)
def test_and_from_another_rank(kind):
    watch = SimpleNamespace(serving=False, _name=lambda member: member)
    told = {"kind": kind, "message": "what was wrong", "expected": True}
    error = Watch._failure(watch, "rank 1", told)
    assert (type(error), str(error)) == (KINDS[kind], "rank 1: what was wrong")
