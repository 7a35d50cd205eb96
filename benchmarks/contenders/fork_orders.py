"""What our clones ask for, by contender."""

from __future__ import annotations

from dataclasses import dataclass

from .fork_ablation import NONE


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a clone asks for, and what is left out of it."""

    approach: str = "deepclone"
    transport: str = ""
    """Without one: memory on one machine, gloo between machines."""
    gated: bool = False
    """Whether the first forward pass begins before all is there, as it does for users."""
    without: str = NONE

    @property
    def since(self) -> str:
        return "backward" if self.approach == "deepclone" else "end"


ORDERS = {
    "sapwood": Order(),
    "sapwood gated": Order(gated=True),
    "sapwood gloo": Order(transport="gloo"),
    "sapwood lazy": Order(approach="lazy"),
    "sapwood p2p": Order(approach="p2p"),
    "sapwood unsharded": Order(transport="gloo", without="unsharded"),
    "sapwood unpacked": Order(transport="gloo", without="unpacked"),
    "sapwood sliced": Order(transport="gloo", without="sliced"),
}
