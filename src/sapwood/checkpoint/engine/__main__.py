"""``python -m sapwood.checkpoint.engine <descriptor>``: started by a rank, see ``launch``."""

from __future__ import annotations

import sys

from sapwood.checkpoint.engine.daemon import main

if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
