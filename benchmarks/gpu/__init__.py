"""Tests and benchmarks that need a GPU: `python3 -m benchmarks.gpu OUT` runs all of them."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Names the file in which a step leaves what it found, as JSON.
RESULT_VARIABLE = "KVX_GPU_RESULT"

# Where a run of tests is that has reached none of them, or gone through all.
COLLECTION, ENDED = "collection", "the end"
