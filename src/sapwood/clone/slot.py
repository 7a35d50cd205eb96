"""A text as a message: both sides must know a message's size before, and nobody knows a text's."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["SLOT", "pack_text", "unpack_text"]

SLOT = 256 * 1024
_LENGTH = 8


def pack_text(text: str) -> Tensor | None:
    """A message of ``SLOT`` bytes, or None if the text is longer."""
    raw = text.encode()
    if len(raw) > SLOT - _LENGTH:
        return None
    whole = (len(raw).to_bytes(_LENGTH, "big") + raw).ljust(SLOT, b"\0")
    return torch.frombuffer(bytearray(whole), dtype=torch.uint8)


def unpack_text(data: Tensor) -> str:
    """The reverse of ``pack_text``; empty if nothing was written."""
    raw = bytes(data.cpu().numpy())
    length = int.from_bytes(raw[:_LENGTH], "big")
    return raw[_LENGTH : _LENGTH + length].decode()
