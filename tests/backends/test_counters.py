"""Counters that were not cleared: no tile is lost, none is computed twice at once, and nothing leads out of memory.

Thread blocks of a kernel take tiles from one counter, and find out by others which of them is the last of a tile whose
keys are split. All are zero between calls, unless someone else has written to them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import compilers
import pytest
import torch
from compare import assert_bitwise
from environment import choose_backend
from fused_problems import Mode, call
from guards import Guarded
from pairs import every
from planned_runs import single, wrapped
from problems import Options, make_batch

import cutlass_kernels as ck

DIRTY: dict[str, Callable[[torch.Tensor], object]] = {
    "ones": lambda counters: counters.view(torch.uint8).fill_(0xFF),
    "one": lambda counters: counters.fill_(1),
    "some tiles": lambda counters: counters.fill_(100),
    "negative": lambda counters: counters.fill_(-5),
    "large": lambda counters: counters.fill_(2**31 - 1),
    "lowest": lambda counters: counters.fill_(-(2**31)),
    "first word": lambda counters: counters[::2].fill_(7),
    "second word": lambda counters: counters[1::2].fill_(7),
    "text": lambda counters: counters.view(torch.uint8).fill_(ord(" ")),
    "halves": lambda counters: counters.view(torch.float16).fill_(0.25),
    "random": lambda counters: counters.random_(-(2**31), 2**31 - 1),
}


@pytest.fixture(params=DIRTY)
def dirty(request: pytest.FixtureRequest) -> Callable[[torch.Tensor], object]:
    return DIRTY[request.param]


def counters() -> torch.Tensor:
    """Those of calls on the current stream."""
    from cutlass_kernels import _C

    made: torch.Tensor = _C.counters(0, torch.cuda.current_stream().cuda_stream)
    return made


def check(run: Callable[[], torch.Tensor], of_call: torch.Tensor, dirty: Callable[[torch.Tensor], object]) -> None:
    """What ``run`` returns does not depend on what its counters hold, nor does what the call after it returns."""
    torch.cuda.synchronize()
    of_call.zero_()
    want = run()
    assert bool(want.isfinite().all())
    torch.cuda.synchronize()
    assert torch.count_nonzero(of_call) == 0, "a call leaves its counters at zero"
    try:
        dirty(of_call)
        for _ in range(3):
            assert_bitwise(run(), want)
    finally:
        torch.cuda.synchronize()
        of_call.zero_()


@pytest.mark.pairwise
@every(causal=[False, True], head_dim=[64, 128, 256])
def test_tiles_of_a_single_call(kernel_backend, dirty, head_dim, causal):
    # 770 tiles of 64 rows, or 420 of 128: more than a device has thread blocks.
    batch = make_batch([700], [700], 70, 10, head_dim, device="cuda:0")

    def run() -> torch.Tensor:
        out = torch.full_like(batch.q, torch.nan)
        return ck.single_prefill_with_kv_cache(
            batch.q, batch.k, batch.v, causal=causal, backend=kernel_backend, out=out
        )

    check(run, counters(), dirty)


@pytest.mark.parametrize("rows,keys", [(1, 300), (1, 3000), (3, 3000), (40, 6000)])
def test_split_keys_of_a_single_call(kernel_backend, dirty, rows, keys):
    # One row of four heads is merged by fa2's last thread block, more rows are by a kernel of their own.
    batch = make_batch([rows], [keys], 8, 2, 128, device="cuda:0")

    def run() -> torch.Tensor:
        return torch.cat([x.float().flatten() for x in single(kernel_backend, batch, Options(causal=True))])

    check(run, counters(), dirty)


FUSED = {"split keys": ([1, 1, 1], [2500, 20, 2500], 8, 2), "tiles": ([300, 200, 1], [400, 900, 300], 72, 8)}


@pytest.mark.pairwise
@every(lengths=FUSED, layout=["CONTIGUOUS_Q_KV", "Q_PAGED_KV_NHD"])
def test_fused_prefill(kernel_backend, dirty, monkeypatch, layout, lengths):
    choose_backend(monkeypatch, kernel_backend)
    batch = make_batch(*lengths, 64, device="cuda:0")

    def run() -> torch.Tensor:
        out = Guarded(batch.q.shape, batch.q.dtype, batch.device)
        call(batch, layout, Mode(), out=out.tensor)
        torch.cuda.synchronize()
        out.check("out")
        return out.tensor

    check(run, counters(), dirty)


def test_tiles_of_a_planned_batch(kernel_backend, dirty):
    batch = make_batch([700, 3, 400], [700, 900, 450], 70, 10, 64, device="cuda:0")
    call = wrapped(kernel_backend, batch)
    counters = call.wrapper._int_workspace_buffer[:8].view(torch.int32)  # where they stay when another batch is planned
    if kernel_backend == "fa3":
        counters.fill_(-1)
    call.plan(Options(causal=True)).run()
    assert not counters.any()
    check(call.run, counters, dirty)


def test_every_ticket_is_taken_once_whatever_the_counter_holds(tmp_path: Path):
    compilers.write_host_cute(tmp_path)
    program, source = tmp_path / "tickets", compilers.ROOT / "tests/cpp/tickets.cpp"
    folders = [f"-I{tmp_path}", f"-I{compilers.SOURCES / 'src'}"]
    compilers.run(compilers.host_compiler(), "-std=c++17", "-O1", *folders, source, "-o", program)
    assert compilers.run(program).strip() == "OK"
