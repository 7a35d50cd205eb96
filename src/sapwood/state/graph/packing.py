"""Bytes of the encoding: variable-length numbers, texts, and a reader that checks bounds."""

from __future__ import annotations

import itertools

from sapwood.errors import GraphError
from sapwood.state.graph.model import Config

__all__ = ["PackReader", "pack_config", "pack_text", "unpack_config", "varint"]

_SMALL = tuple(bytes((n,)) for n in range(128))
_LARGEST = 63  # bits of a number: sizes of tensors are signed 64-bit numbers in torch


def varint(value: int) -> bytes:
    """A number of 0 or more in groups of seven bits, the low ones first."""
    if value < 128:
        return _SMALL[value]
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def pack_text(text: str) -> bytes:
    """A text with its length."""
    encoded = text.encode("utf-8", "surrogatepass")
    return varint(len(encoded)) + encoded


class PackReader:
    """Reads what ``varint`` and ``pack_text`` wrote, and nothing outside of it."""

    def __init__(self, data: bytes, what: str) -> None:
        """``what`` names the data in errors."""
        self._data, self._at, self._what = data, 0, what

    @property
    def left(self) -> int:
        """Bytes not read yet."""
        return len(self._data) - self._at

    def fail(self, why: str) -> GraphError:
        """The error to raise: what is wrong, and where."""
        return GraphError(
            f"{self._what} is damaged at byte {self._at} of {len(self._data)}: {why}; read it "
            "again from another copy, or save the model anew"
        )

    def take(self, count: int) -> bytes:
        """The next ``count`` bytes."""
        if count > self.left:
            raise self.fail(f"{count} bytes expected, {self.left} there")
        self._at += count
        return self._data[self._at - count : self._at]

    def byte(self) -> int:
        """The next byte."""
        if self._at >= len(self._data):
            raise self.fail("a byte expected, nothing there")
        self._at += 1
        return self._data[self._at - 1]

    def number(self, below: int | None = None, what: str = "number") -> int:
        """The next number; ``below`` is a limit it must not reach."""
        value = shift = 0
        data, end = self._data, len(self._data)
        while True:
            if self._at >= end:
                raise self.fail(f"{what} expected, nothing there")
            byte = data[self._at]
            self._at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                break
            shift += 7
            if shift > _LARGEST:
                raise self.fail(f"{what} has more than {_LARGEST} bits")
        if shift and not byte:
            raise self.fail(f"{what} is not written in its shortest form")
        if value >> _LARGEST:
            raise self.fail(f"{what} has more than {_LARGEST} bits")
        if below is not None and value >= below:
            raise self.fail(f"{what} is {value}, expected less than {below}")
        return value

    def count(self, what: str) -> int:
        """A number of things that follow: each takes a byte or more, so no more than are left."""
        return self.number(self.left + 1, f"number of {what}")

    def text(self) -> str:
        """The next text."""
        try:
            return self.take(self.number(what="length of a text")).decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise self.fail(f"a text is no UTF-8 ({error.reason})") from None

    def end(self) -> None:
        """See that nothing is left."""
        if self.left:
            raise self.fail(f"{self.left} bytes too many")


def pack_config(config: Config) -> bytes:
    """A configuration as bytes, the same for equal ones: an entry of the configuration table."""
    parts = [pack_text(config.kind), varint(len(config.settings))]
    for name, value in config.settings:
        parts += [pack_text(name), pack_text(value)]
    parts.append(varint(len(config.tensors)))
    for local, shape in config.tensors:
        parts += [pack_text(local), varint(len(shape)), *map(varint, shape)]
    return b"".join(parts)


def unpack_config(data: bytes) -> Config:
    """The reverse of ``pack_config``.

    Raises:
        GraphError: it is damaged.
    """
    reader = PackReader(data, "a layer's configuration")
    kind = reader.text()
    settings = tuple((reader.text(), reader.text()) for _ in range(reader.count("settings")))
    tensors = []
    for _ in range(reader.count("tensors")):
        local = reader.text()
        shape = tuple(reader.number() for _ in range(reader.count("dimensions")))
        tensors.append((local, shape))
    reader.end()
    for names in (settings, tensors):
        keys = [name for name, _ in names]
        if any(a >= b for a, b in itertools.pairwise(keys)):
            raise reader.fail("names are not in order")
    return Config(kind, settings, tuple(tensors))
