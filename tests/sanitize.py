"""Runs every tile of every kernel once or more, for compute-sanitizer.

    compute-sanitizer --tool memcheck  --kernel-name kns=attention_kernel python tests/sanitize.py
    compute-sanitizer --tool racecheck --kernel-name kns=attention_kernel python tests/sanitize.py --rounds 3
    compute-sanitizer --tool memcheck  --kernel-name kns=schedule_kernel  python tests/sanitize.py

The filter takes the kernels of both backends. A hazard may show in one round of several. Shapes are small, but have
tiles enough to be given the large ones (config.h of either backend) and to give blocks of fa3 several, rows and warps
without keys, and tiles that end inside a sequence.
"""

from __future__ import annotations

import argparse
from itertools import accumulate

import torch

import cutlass_kernels as ck

Lengths = list[tuple[int, int]]  # (queries, keys) per request


def attend(
    backend: str,
    head_dim: int,
    heads: tuple[int, int],
    lengths: Lengths,
    dtype: torch.dtype = torch.bfloat16,
    causal: bool = False,
    window_left: int = -1,
    soft_cap: float | None = None,
    sinks: bool = False,
) -> None:
    """One call; fails where a result is not finite. Head dimension 192 has values of 128."""
    head_dim_vo = 128 if head_dim == 192 else head_dim
    qo, kv = ([0, *accumulate(column)] for column in zip(*lengths))
    q = torch.randn(qo[-1], heads[0], head_dim, device="cuda", dtype=dtype)
    k = torch.randn(kv[-1], heads[1], head_dim, device="cuda", dtype=dtype)
    v = torch.randn(kv[-1], heads[1], head_dim_vo, device="cuda", dtype=dtype)
    sink = torch.randn(heads[0], device="cuda") if sinks else None
    if len(lengths) == 1:
        out, _ = ck.single_prefill_with_kv_cache(
            q,
            k,
            v,
            causal=causal,
            window_left=window_left,
            logits_soft_cap=soft_cap,
            backend=backend,
            return_lse=True,
            sinks=sink,
        )
    else:
        workspace = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
        wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(workspace, backend=backend)
        offsets = torch.tensor([qo, kv], dtype=torch.int32)
        wrapper.plan(
            offsets[0],
            offsets[1],
            *heads,
            head_dim,
            head_dim_vo=head_dim_vo,
            causal=causal,
            window_left=window_left,
            logits_soft_cap=soft_cap,
            q_data_type=dtype,
        )
        out, _ = wrapper.run(q, k, v, return_lse=True, sinks=sink)
    assert out.isfinite().all()


def every_tile(backend: str, head_dim: int) -> None:
    """Calls that between them use every tile a GPU has of a head dimension: where it has the shared memory for fa2's
    large one of 256, it never uses the small one, which is for other GPUs."""
    batch = [(1, 300), (0, 5), (40, 0), (130, 70), (65, 200)]
    attend(backend, head_dim, (4, 2), [(70, 130)], causal=True)
    attend(backend, head_dim, (4, 1), [(33, 257)], window_left=20, sinks=True)
    attend(backend, head_dim, (2, 1), batch, causal=True, soft_cap=30.0, sinks=True)
    attend(backend, head_dim, (70, 70), [(300, 333)])
    attend(backend, head_dim, (70, 7), [(300, 333)], torch.float16, causal=True)
    attend(backend, head_dim, (70, 14), [(640, 640)], causal=True, window_left=50)
    attend(backend, head_dim, (70, 70), [(300, 150)], soft_cap=20.0)
    if head_dim == 64:
        attend(backend, 64, (64, 64), [(128, 128)] * 34, causal=True)  # many short tiles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--backends", nargs="*", default=[b for b in ("fa2", "fa3") if not ck.explain().reasons[b]])
    parser.add_argument("--head-dims", type=int, nargs="*", default=[64, 80, 128, 192, 256])
    args = parser.parse_args()
    torch.manual_seed(0)
    for _ in range(args.rounds):
        for backend in args.backends:
            for head_dim in args.head_dims:
                every_tile(backend, head_dim)
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()
