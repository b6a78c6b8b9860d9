"""The tools and the benchmark are scripts, whose modules import one another by name."""

from __future__ import annotations

import sys

from paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
sys.path.append(str(ROOT / "tools"))
