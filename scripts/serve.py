"""The HTTP server as a script: `python scripts/serve.py MODEL --port 8000` is `jaxserve serve MODEL --port 8000`."""

from __future__ import annotations

import sys

from jaxserve.tools.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
