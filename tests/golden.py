"""Where the golden files are, when they are there: beside the repository, not in it."""

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[1].parent / "shared"
GOLDEN = SHARED / "golden"
DATA = SHARED / "data"

needs_golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason="no golden files beside the repository")
