from __future__ import annotations

import sys

from scripts.ci.run import main

sys.exit(main())
