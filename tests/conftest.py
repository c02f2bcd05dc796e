"""What all tests share."""

from __future__ import annotations

import os

# In one process Ray keeps the first token that it was given, for every cluster that is started later.
os.environ.setdefault("RAY_AUTH_TOKEN", "0" * 64)
