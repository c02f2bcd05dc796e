"""What the tests of reports share."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # tests are no packages; these helpers are this folder's alone
