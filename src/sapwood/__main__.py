"""So that ``python -m sapwood`` works where the ``sapwood`` script is not on the path."""

from __future__ import annotations

import sys

from sapwood.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
