"""Values of options that cyclopts would take too lightly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from cyclopts import Parameter, Token

__all__ = ["Whole"]


def _whole(kind: Any, tokens: Sequence[Token]) -> int:
    """A whole number; cyclopts alone rounds fractions, so that 1.5 ranks would be two."""
    text = tokens[0].value
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r}, expected a whole number") from None


Whole = Annotated[int, Parameter(converter=_whole)]
"""A whole number, and no other."""
