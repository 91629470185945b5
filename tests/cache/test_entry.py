"""An entry proves itself: no damage, no mixture and no other kernel's bytes pass for it."""

from __future__ import annotations

import hashlib
import json
import random
import struct

import pytest

from kiln.cache.entry import ALIGNMENT, MAGIC, EntryError, decode, encode
from kiln.cache.keys import content_key

KEY, OTHER = content_key([("n", b"1")]), content_key([("n", b"2")])
PAYLOAD = random.Random(7).randbytes(500)
DATA = encode(KEY, PAYLOAD, {"arch": "sm_90a", "options": ["-a", "-b"]})


def believed(data, key=KEY, arch="sm_90a"):
    try:
        decode(bytes(data), key, arch)
    except EntryError:
        return False
    return True


def sealed(header, payload=PAYLOAD, magic=MAGIC, length=None):
    """An entry with any header and a digest that fits."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if length is None else length
    body = magic + struct.pack("<I", length) + text + payload
    return body + hashlib.sha256(body).digest()


def test_what_was_encoded_is_decoded():
    entry = decode(DATA, KEY, "sm_90a")
    assert entry.payload == PAYLOAD
    assert entry.header == {
        "arch": "sm_90a", "options": ["-a", "-b"], "key": KEY, "size": len(PAYLOAD)
    }  # fmt: skip
    assert decode(encode(KEY, b"", {}), KEY).payload == b""


def test_the_same_content_is_the_same_bytes_and_the_payload_is_aligned():
    assert encode(KEY, PAYLOAD, {"options": ["-a", "-b"], "arch": "sm_90a"}) == DATA
    for filler in range(70):
        data = encode(KEY, PAYLOAD, {"filler": "x" * filler})
        assert data.index(PAYLOAD) % ALIGNMENT == 0
        assert decode(data, KEY).payload == PAYLOAD


def test_every_single_bit_flip_is_refused():
    work = bytearray(DATA)
    for bit in range(8 * len(work)):
        work[bit >> 3] ^= 1 << (bit & 7)
        assert not believed(work), f"bit {bit}"
        work[bit >> 3] ^= 1 << (bit & 7)
    assert believed(work)


def test_every_truncation_and_every_addition_is_refused():
    assert not any(believed(DATA[:size]) for size in range(len(DATA)))
    assert not believed(DATA + b"\0")
    assert not believed(b"\0" + DATA)
    assert not believed(DATA + DATA)


def test_another_keys_or_targets_entry_is_refused():
    assert not believed(DATA, key=OTHER)
    assert not believed(DATA, arch="sm_90")
    with pytest.raises(EntryError, match="its arch is 'sm_90a', want 'sm_90'"):
        decode(DATA, KEY, "sm_90")


@pytest.mark.parametrize(
    "data",
    [
        sealed({"key": KEY, "arch": "sm_90a"}),  # no size
        sealed({"key": KEY, "arch": "sm_90a", "size": len(PAYLOAD) - 1}),
        sealed({"key": KEY, "arch": "sm_90a", "size": len(PAYLOAD)}, length=2**32 - 1),
        sealed({"key": KEY, "arch": "sm_90a", "size": len(PAYLOAD)}, length=0),
        sealed({"key": KEY, "arch": "sm_90a", "size": len(PAYLOAD)}, magic=b"KILNKC1\n"),
        sealed({"key": [KEY], "arch": "sm_90a", "size": len(PAYLOAD)}),
        sealed([]),
        sealed(b"\xff\xfe"),
        sealed(b"[" * 100_000),
        MAGIC,
        b"",
    ],
    ids=lambda data: str(len(data)),
)
def test_an_entry_that_makes_no_sense_is_refused_though_its_digest_fits(data):
    assert not believed(data)


def test_the_digest_alone_does_not_make_an_entry():
    assert believed(sealed({"key": KEY, "arch": "sm_90a", "size": len(PAYLOAD)}))  # the control
