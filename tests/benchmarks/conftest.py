"""The scripts of `benchmarks/` import what is beside them."""

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path += [str(BENCHMARKS), str(BENCHMARKS / "gpu")]
