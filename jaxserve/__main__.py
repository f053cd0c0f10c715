"""`python -m jaxserve`: the same as the command `jaxserve`."""

import sys

from jaxserve.tools.cli import main

sys.exit(main())
