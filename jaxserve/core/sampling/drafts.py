"""The id that stands where a row has no draft."""

from __future__ import annotations

NO_DRAFT = -4  # no token and no sentinel is this number
