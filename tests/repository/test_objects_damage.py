"""Damage of a repository of objects is found, and said with the name of what is damaged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sapwood.errors import Damaged, NotFound
from sapwood.repository.names import parse
from sapwood.repository.objects.backend import ObjectBackend
from sapwood.repository.objects.blobs import decode_moved, encode_moved
from sapwood.repository.objects.head import BlobRow, Head, decode_layers, encode_layers
from sapwood.repository.objects.layout import frame
from sapwood.testing.repository.common import content, gc, new_model, problems_of, read_all, save
from tests.repository.objects import again, backend, change, keys

__all__ = ["backend"]


@pytest.mark.parametrize("harm", ["cut", "flip"])
def test_a_damaged_event_is_named(backend: ObjectBackend, harm: str) -> None:
    save(backend, "a@1", {"t": b"1"})
    save(backend, "b@1", {"t": b"2"})
    data = bytearray(backend.keeper.get("log/a/0000000001"))
    data[len(data) // 2] ^= 1
    change(backend, "log/a/0000000001", bytes(data[:-1] if harm == "cut" else data))
    reader = again(backend)
    with pytest.raises(Damaged, match="log/a/0000000001"):
        reader.find(parse("a"))
    assert read_all(reader, "b@1") == {"t": b"2"}
    assert any("log/a/0000000001" in line for line in problems_of(reader))


def test_an_event_that_is_missing_is_said(backend: ObjectBackend) -> None:
    for n in range(3):
        save(backend, f"a@{n}", {"t": b"1"})
    backend.keeper.remove(["log/a/0000000002"])
    with pytest.raises(Damaged, match="log/a/0000000002 is missing"):
        again(backend).models()


def test_a_head_that_is_missing_is_said(backend: ObjectBackend) -> None:
    save(backend, "a@1", {"t": b"1"})
    backend.keeper.remove(keys(backend, "heads"))
    with pytest.raises(Damaged, match=r"a@1: .*its head is missing"):
        again(backend).manifest(parse("a@1"))
    assert "a@1" in problems_of(backend)[0]
    with pytest.raises(NotFound):
        gc(backend)


def test_a_pack_that_is_missing_is_said_with_the_tensor(backend: ObjectBackend) -> None:
    save(backend, "a@1", {"layer": b"1"})
    backend.keeper.remove(keys(backend, "packs"))
    with pytest.raises(Damaged, match="a@1 layer"):
        read_all(again(backend), "a@1")
    assert "a@1 layer" in problems_of(backend)[0]


def test_changed_bytes_are_found_when_they_are_read(backend: ObjectBackend) -> None:
    save(backend, "a@1", {"layer": content(1, 1000), "other": content(2, 1000)})
    (pack,) = keys(backend, "packs")
    data = bytearray(backend.keeper.get(pack))
    data[500] ^= 1
    change(backend, pack, bytes(data))
    with pytest.raises(Damaged, match=r"a@1 layer: .*checksum"):
        read_all(backend, "a@1")


def test_every_copy_of_a_tensor_is_verified(backend: ObjectBackend) -> None:
    """Equal tensors in two packs: the damaged one is found, whichever this process prefers."""
    data, other = content(1, 1000), again(backend)
    save(backend, "a@1", {"t": data})
    save(other, "b@1", {"t": data})
    assert len(keys(backend, "packs")) == 2
    for pack in keys(backend, "packs"):
        whole = backend.keeper.get(pack)
        change(backend, pack, bytes(1000))
        for reader in (backend, other, again(backend)):
            assert len(problems_of(reader)) == 1
        change(backend, pack, whole)


@given(st.data())
def test_no_bytes_make_a_decoder_fail_otherwise(data: st.DataObject) -> None:
    row = BlobRow("packs/00/x", 0, 5, bytes(32), bytes(16))
    head = Head(manifest=new_model("a@1", {"t": b"12345"}).with_blobs((0,)).manifest, rows=[row])
    objects = [
        (head.encode(), Head.decode),
        (encode_layers({b"1": 5}), decode_layers),
        (encode_moved("packs/00/x", {bytes(32): ("packs/00/y", 0)}), decode_moved),
    ]
    whole, decode = data.draw(st.sampled_from(objects))
    decode(whole, "key")
    at = data.draw(st.integers(0, len(whole) - 1))
    kind = data.draw(st.sampled_from(["flip", "cut", "noise"]))
    broken = {
        "flip": whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :],
        "cut": whole[:at],
        "noise": data.draw(st.binary(max_size=200)),
    }[kind]
    with pytest.raises(Damaged, match="key"):
        decode(broken, "key")


@given(st.binary(max_size=300))
def test_a_head_that_lies_about_itself_is_refused(body: bytes) -> None:
    with pytest.raises(Damaged):
        Head.decode(frame(b"HD", body), "key")
