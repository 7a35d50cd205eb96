"""So that ``python -m sapwood.cli`` works where the ``sapwood`` script is not on the path."""

from __future__ import annotations

import sys

from sapwood.cli.main import main

sys.exit(main())
