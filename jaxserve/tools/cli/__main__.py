"""`python -m jaxserve.tools.cli`."""

import sys

from jaxserve.tools.cli import main

sys.exit(main())
