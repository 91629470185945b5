"""An entry proves itself: no damage, no mixture and no other kernel's bytes pass for it."""

from __future__ import annotations

import hashlib
import json
import random

import pytest

from kiln.cache.disk.entry import (
    ALIGNMENT,
    HEAD,
    MAGIC,
    Entry,
    EntryError,
    decode,
    encode,
    header_of,
)
from kiln.cache.keys import content_key

KEY, OTHER = content_key([("n", b"1")]), content_key([("n", b"2")])
ARCH = "sm_90a"
PAYLOAD = random.Random(7).randbytes(500)
DATA = encode(KEY, ARCH, Entry.of({"kernel": "k", "options": ["-a", "-b"]}, PAYLOAD))


def believed(data, key=KEY, arch=ARCH):
    try:
        decode(bytes(data), key, arch)
    except EntryError:
        return False
    return True


def sealed(text=b"{}", magic=MAGIC, lengths=(0, 0), key=KEY, arch=ARCH):
    """An entry with any text, lengths that are off by so much, and a digest that fits."""
    sizes = (len(text) + lengths[0], len(PAYLOAD) + lengths[1])
    head = HEAD.pack(magic, *(size % 2**32 for size in sizes), bytes.fromhex(key), arch.encode())
    body = head + text + PAYLOAD
    return body + hashlib.sha256(body).digest()


def test_what_was_encoded_is_decoded():
    entry = decode(DATA, KEY, ARCH)
    assert entry.payload == PAYLOAD
    assert entry.header == header_of(DATA) == {"kernel": "k", "options": ["-a", "-b"]}
    assert decode(encode(KEY, ARCH, Entry.of({}, b"")), KEY, ARCH).payload == b""


def test_the_same_content_is_the_same_bytes_and_the_payload_is_aligned():
    header = {"options": ["-a", "-b"], "kernel": "k"}
    assert encode(KEY, ARCH, Entry.of(header, PAYLOAD)) == DATA
    assert encode(KEY, ARCH, decode(DATA, KEY, ARCH)) == DATA
    for filler in range(70):
        data = encode(KEY, ARCH, Entry.of({"filler": "x" * filler}, PAYLOAD))
        assert data.index(PAYLOAD) % ALIGNMENT == 0
        assert decode(data, KEY, ARCH).payload == PAYLOAD


def test_what_has_no_place_in_an_entry_is_refused():
    for key in (KEY[2:], "x" * 64):
        with pytest.raises(ValueError, match="want 64 hex digits"):
            encode(key, ARCH, Entry.of({}, b""))
    with pytest.raises(ValueError, match="at most 16 bytes"):
        encode(KEY, "sm_90a-and-more-than-16", Entry.of({}, b""))


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
    with pytest.raises(EntryError, match=f"its key is {KEY}, want {OTHER}"):
        decode(DATA, OTHER, ARCH)


@pytest.mark.parametrize(
    "data",
    [
        *(sealed(lengths=off) for off in ((0, -1), (0, 1), (1, 0), (-1, 0), (-3, 0))),
        sealed(magic=b"KILNKC2\n"),
        sealed(key=OTHER),
        sealed(arch="sm_90"),
        sealed(arch="sm_90a-and-so-on"),
        MAGIC,
        b"",
    ],
    ids=lambda data: hashlib.sha256(data).hexdigest()[:6],
)
def test_an_entry_that_makes_no_sense_is_refused_though_its_digest_fits(data):
    assert not believed(data)


@pytest.mark.parametrize("text", [b"", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"key": 1'])
def test_a_header_that_is_none_says_nothing(text):
    data = sealed(text)
    assert decode(data, KEY, ARCH).header == header_of(data) == {}


def test_what_is_no_entry_says_nothing():
    assert header_of(b"") == header_of(MAGIC) == header_of(DATA[:80]) == {}


def test_the_digest_alone_does_not_make_an_entry():
    assert believed(sealed(json.dumps({"kernel": "k"}).encode()))  # the control
