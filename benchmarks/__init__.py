"""Every way to accumulate gradients, on the same work, in one interleaved run."""

import sys
from pathlib import Path

# The transformer and its adapters are those of the examples.
sys.path.append(str(Path(__file__).parents[1] / "examples"))
