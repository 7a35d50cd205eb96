"""Finding versions by their metrics, names, tags, ages and sizes.

    val_acc > 0.9 and size < 1GB and not tag = broken

A small language of its own, read here and never evaluated as code.

    expression   terms with ``and``, ``or``, ``not`` and parentheses
    term         METRIC OP number             any number saved with a version; ``has METRIC``
                 name|version|tag OP text     ``=``, ``!=``, and ``~`` for a pattern: 'nt3/*'
                 size OP size                 1GB, 500MB, 2GiB, or bytes
                 tensors OP number
                 created OP date              2026-11-19, 2026-11-19T14:30; local time
                 age OP time                  90s, 10min, 7d
    OP           ``<``, ``<=``, ``>``, ``>=``, ``=``, ``!=``

A metric that is called like one of these words, or has spaces in it, is written in quotes. A
version that has not the metric does not fit a term about it, whatever its operator.
"""

from __future__ import annotations

from sapwood.store.finding.parser import parse_expression
from sapwood.store.finding.search import ordered, search
from sapwood.store.finding.words import parse_size

__all__ = ["ordered", "parse_expression", "parse_size", "search"]
