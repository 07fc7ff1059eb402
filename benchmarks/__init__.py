"""Measures every way to accumulate gradients on the same work, interleaved."""

import sys
from pathlib import Path

# The transformer and its adapters come from the examples.
sys.path.append(str(Path(__file__).parents[1] / "examples"))
