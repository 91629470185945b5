"""A bundle gives back what was put in, and a bundle that anybody touched is refused."""

from __future__ import annotations

import hashlib
import json
import os
import random
import struct

import pytest
from depth import at_depth

from kiln.cache.disk.bundle import Bundle, BundleError, write_bundle
from kiln.cache.disk.entry import Entry
from kiln.cache.disk.store import Store
from kiln.cache.disk.trust import Trust
from kiln.cache.keys import content_key

ARCHS = ("sm_80", "sm_90a")
KEYS = [content_key([("n", bytes([n]))]) for n in range(3)]


def entries():
    return [
        (arch, key, Entry.of({"kernel": key[:4]}, random.Random(key).randbytes(150)))
        for arch in ARCHS
        for key in KEYS
    ]


@pytest.fixture
def bundle(tmp_path):
    path = tmp_path / "kernels.kpack"
    return path, write_bundle(path, entries())


def refused(path, data, **expected):
    path.write_bytes(data)
    try:
        opened = Bundle.open(path, **expected)
        list(opened.entries())
    except BundleError:
        return True
    return False


def reseal(data):
    return data[:-32] + hashlib.sha256(data[:-32]).digest()


def test_what_went_in_comes_out(bundle):
    path, sha256 = bundle
    opened = Bundle.open(path, sha256)
    assert opened.sha256 == sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert len(opened) == 6
    for arch, key, entry in entries():
        got = opened.get(arch, key)
        assert got.payload == entry.payload
        assert got.header["kernel"] == key[:4]
    assert opened.get("sm_120", KEYS[0]) is None
    assert [(a, k) for a, k, _ in opened.entries()] == sorted((a, k) for a, k, _ in entries())


def test_the_same_entries_make_the_same_file_in_any_order(bundle, tmp_path):
    path, sha256 = bundle
    again = tmp_path / "again.kpack"
    assert write_bundle(again, reversed(entries())) == sha256
    assert write_bundle(again, Bundle.open(path).entries()) == sha256  # out and in again
    assert again.read_bytes() == path.read_bytes()
    assert not list(tmp_path.glob(".tmp*"))


def test_entries_go_from_a_store_to_a_bundle_to_a_store_unchanged(tmp_path):
    first, second = Store(tmp_path / "a"), Store(tmp_path / "b")
    for arch, key, entry in entries():
        assert first.put(arch, key, entry.payload, {**entry.header, "options": ["-o"]})
    found = [(s.arch, s.key, first.get(s.arch, s.key)) for s in first.entries()]
    write_bundle(tmp_path / "b.kpack", found)
    for arch, key, entry in Bundle.open(tmp_path / "b.kpack").entries():
        assert second.put(arch, key, entry.payload, entry.header)
    for stored in first.entries():
        copy = second.path(stored.arch, stored.key)
        assert copy.read_bytes() == stored.path.read_bytes()


def test_an_empty_bundle_is_a_bundle(tmp_path):
    write_bundle(tmp_path / "empty.kpack", [])
    assert list(Bundle.open(tmp_path / "empty.kpack").entries()) == []


def test_every_flipped_bit_and_every_truncation_is_refused(bundle):
    path, _ = bundle
    good = path.read_bytes()
    work = bytearray(good)
    step = at_depth(3, 1)
    for index in range(0, len(work), step):
        work[index] ^= 1 << index % 8
        assert refused(path, work), f"byte {index}"
        work[index] ^= 1 << index % 8
    assert all(refused(path, good[:size]) for size in range(0, len(good), step))
    assert refused(path, good + b"\0")
    assert not refused(path, good)


def test_a_resealed_bundle_is_refused_by_its_pin(bundle):
    path, sha256 = bundle
    good = path.read_bytes()
    other = write_bundle(path, entries()[1:])
    assert refused(path, path.read_bytes(), sha256=sha256)
    assert not refused(path, path.read_bytes(), sha256=other.upper())
    assert refused(path, good, sha256=other)
    with pytest.raises(BundleError, match=f"want {other}"):
        Bundle.open(path, other)


def test_every_flipped_byte_of_an_entry_is_found_by_the_manifest_though_resealed(bundle):
    path, _ = bundle
    good = path.read_bytes()
    start = 12 + struct.unpack_from("<I", good, 8)[0]
    listed = json.loads(good[12:start])["entries"]
    inside = [
        start + item["offset"] + index for item in listed for index in range(0, item["size"], 5)
    ]
    for place in inside:
        work = bytearray(good)
        work[place] ^= 0x10
        assert refused(path, reseal(bytes(work))), f"byte {place}"


def test_swapped_entries_are_refused_though_resealed(bundle):
    path, _ = bundle
    good = path.read_bytes()
    start = 12 + struct.unpack_from("<I", good, 8)[0]
    listed = json.loads(good[12:start])["entries"]

    def with_manifest(items):
        text = json.dumps({"entries": items}, sort_keys=True, separators=(",", ":")).encode()
        text = text.ljust(start - 12)
        assert len(text) == start - 12
        return reseal(good[:12] + text + good[start:])

    assert not refused(path, with_manifest(listed))  # the control
    for field in ("offset", "sha256", "key", "arch"):
        items = json.loads(json.dumps(listed))
        items[0][field], items[-1][field] = items[-1][field], items[0][field]
        assert refused(path, with_manifest(items)), field
    whole = json.loads(json.dumps(listed))
    for field in ("offset", "sha256"):  # consistent, but another kernel's
        whole[0][field], whole[1][field] = whole[1][field], whole[0][field]
    assert refused(path, with_manifest(whole))
    other_target = [{**listed[0], "arch": "sm_75"}, *listed[1:]]
    assert refused(path, with_manifest(other_target))


@pytest.mark.parametrize(
    "item",
    [
        {"key": "../" + KEYS[0][3:]}, {"arch": "sm_1"}, {"arch": "../.."}, {"offset": -64},
        {"size": 0}, {"size": 10**6}, {"size": "1"}, {"offset": None}, {"key": None},
        {"arch": "sm_80", "key": min(KEYS)},  # twice
    ],
    ids=str,
)  # fmt: skip
def test_a_manifest_that_makes_no_sense_is_refused_when_it_is_opened(bundle, item):
    path, _ = bundle
    good = path.read_bytes()
    start = 12 + struct.unpack_from("<I", good, 8)[0]
    listed = json.loads(good[12:start])["entries"]
    text = json.dumps({"entries": [*listed[:-1], {**listed[-1], **item}]}).encode()
    body = good[:8] + struct.pack("<I", len(text)) + text + good[start:]
    path.write_bytes(reseal(body))
    with pytest.raises(BundleError, match="is invalid"):
        Bundle.open(path)


def test_a_bundle_in_memory_does_not_change_with_the_file(bundle):
    path, _ = bundle
    opened = Bundle.open(path)
    path.write_bytes(b"\0" * path.stat().st_size)
    for arch, key, entry in entries():
        assert opened.get(arch, key).payload == entry.payload


def test_what_changed_in_memory_is_refused_on_every_read(bundle):
    opened = Bundle.open(bundle[0])
    opened._data = opened._data.replace(entries()[0][2].payload, b"\0" * 150, 1)
    with pytest.raises(BundleError, match="its SHA-256 does not match"):
        opened.get(ARCHS[0], KEYS[0])
    assert opened.get(ARCHS[1], KEYS[0]) is not None


def test_a_bundle_that_others_could_have_written_is_refused(bundle, tmp_path):
    path, _ = bundle
    path.chmod(0o666)
    with pytest.raises(BundleError, match="others can write"):
        Bundle.open(path)
    path.chmod(0o644)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(BundleError, match="not a regular file"):
        Bundle.open(tmp_path / "link")
    with pytest.raises(BundleError, match="No such file"):
        Bundle.open(tmp_path / "absent")
    with pytest.raises(BundleError, match="not a regular file"):
        Bundle.open(tmp_path)


def test_a_file_far_too_large_is_refused_unread(bundle):
    os.truncate(bundle[0], 2**40)
    with pytest.raises(BundleError, match="not a Kiln bundle"):
        Bundle.open(bundle[0])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_bundle_of_a_foreign_owner_is_refused(bundle):
    path, _ = bundle
    os.chown(path, 54321, 54321)
    with pytest.raises(BundleError, match="user 54321"):
        Bundle.open(path)
    assert len(Bundle.open(path, trust=Trust(frozenset({54321})))) == 6


def test_bad_names_and_repetitions_do_not_go_in(tmp_path):
    path = tmp_path / "b.kpack"
    arch, key, entry = entries()[0]
    for bad in ([("sm_90/..", key, entry)], [(arch, "../" + key[3:], entry)]):
        with pytest.raises(ValueError, match=r"target|key"):
            write_bundle(path, bad)
    with pytest.raises(ValueError, match="twice"):
        write_bundle(path, [(arch, key, entry)] * 2)
    assert not path.exists()


def test_a_bundle_that_cannot_be_written_is_an_error_for_the_user(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        write_bundle(tmp_path / "absent" / "b.kpack", entries())


def test_a_bundle_of_another_version_is_refused_when_it_is_opened(bundle):
    path, _ = bundle
    path.write_bytes(reseal(b"KILNKB1\n" + path.read_bytes()[8:]))
    with pytest.raises(BundleError, match="has another version"):
        Bundle.open(path)
