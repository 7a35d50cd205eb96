"""How fast a database can be read on this machine, beside py-lmdb and the disk itself."""

from sapwood.data.bench.measure import Report, Row, bench

__all__ = ["Report", "Row", "bench"]
