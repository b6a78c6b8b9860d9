"""Prefill, decode and combine over several GPUs, beside what torch offers for the same.

    torchrun --nproc-per-node 2 benchmarks/distributed/bench.py prefill --graph --out results

A process per GPU. Layers, each importing from those before it: ranks, compare; kernels; columns; ring, gather,
context_parallel; prefill, decode, combine; rounds, table; run; cli; bench.
"""
