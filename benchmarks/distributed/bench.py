"""Compares this library with what torch offers, over the GPUs of a process group, on the same tensors.

    torchrun --nproc-per-node 2 benchmarks/distributed/bench.py prefill --graph --out results
    torchrun --nproc-per-node 2 benchmarks/distributed/bench.py prefill --workload one --backends allgather,ring_fa2
    torchrun --nproc-per-node 2 benchmarks/distributed/bench.py decode
    torchrun --nproc-per-node 2 benchmarks/distributed/bench.py combine
    torchrun --nproc-per-node 2 benchmarks/distributed/bench.py prefill --device cpu       # a dry run with gloo

`one` is one GPU with the whole problem; `of linear` its time over W times that of W GPUs. How to read the rest:
benchmarks/results/README.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # the folder of this package, not that of this file
    from distributed.cli import main

    main(__doc__)
