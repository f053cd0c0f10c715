"""`python -m jaxserve`: the same as the command `jaxserve`."""

import sys

from jaxserve.cli import main

sys.exit(main())
