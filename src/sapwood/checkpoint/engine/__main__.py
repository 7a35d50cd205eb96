"""``python -m sapwood.checkpoint.engine <descriptor>``: started by a rank, see ``launch``."""

from __future__ import annotations

import logging
import os
import sys

from sapwood.checkpoint.engine.daemon import main

if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    logging.shutdown()
    # Not sys.exit, which waits for threads: one may be stuck for ever in a tier that is gone.
    os._exit(code)
