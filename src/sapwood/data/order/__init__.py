"""In which order records are read: a pure function of seed, epoch and position.

Nothing here reads a file, knows a rank's neighbours or keeps a position. So the same batches come
out on any number of ranks, and going on after a stop is arithmetic.
"""

from __future__ import annotations

from sapwood.data.order.chunks import Chunks
from sapwood.data.order.order import Order
from sapwood.data.order.quality import Quality, quality_of
from sapwood.data.order.spec import OrderSpec

__all__ = ["Chunks", "Order", "OrderSpec", "Quality", "quality_of"]
