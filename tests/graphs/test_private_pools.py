"""What outlives a call never lies in a private pool of torch's allocator: of a compiled graph, or of the caller."""

from __future__ import annotations

import threading
from collections.abc import Callable

import fused_problems
import pytest
import torch
from compare import assert_bitwise
from problems import make_batch

import cutlass_kernels as ck
from cutlass_kernels._compute import kernels
from cutlass_kernels._core import checks, native
from cutlass_kernels._planned import paged_decode

CPU = torch.device("cpu")
HEADS = (12, 4, 64)  # of no other test: their slopes are new


def single_prefill(rows: int, keys: int, **options) -> Callable[[], torch.Tensor]:
    batch = make_batch([rows], [keys], *HEADS, device="cuda:0")
    return lambda: ck.single_prefill_with_kv_cache(batch.q, batch.k, batch.v, **options)


def single_decode(keys: int, **options) -> Callable[[], torch.Tensor]:
    batch = make_batch([1], [keys], *HEADS, device="cuda:0")
    return lambda: ck.single_decode_with_kv_cache(batch.q[0], batch.k, batch.v, **options)


def attention() -> Callable[[], torch.Tensor]:
    batch = make_batch([1], [5000], *HEADS, device="cuda:0")
    q, k, v = (x.unsqueeze(0) for x in (batch.q, batch.k, batch.v))
    return lambda: ck.attention(q, k, v, causal=True)


def fused() -> Callable[[], torch.Tensor]:
    batch = make_batch([1, 1], [5000, 3000], *HEADS, device="cuda:0")
    return lambda: fused_problems.call(batch, "CONTIGUOUS_Q_KV", fused_problems.Mode())


def planned_decode() -> Callable[[], torch.Tensor]:
    batch = make_batch([1] * 3, [500, 9, 30], *HEADS, device="cuda:0")
    pages = batch.paged(16)
    wrapper = ck.BatchDecodeWithPagedKVCacheWrapper(torch.empty(16 << 20, dtype=torch.uint8, device="cuda:0"))
    table = pages.table("cuda:0")

    def call() -> torch.Tensor:
        paged_decode._offsets_on.cache_clear()
        wrapper.plan(*table, *HEADS, 16)
        return wrapper.run(batch.q, pages.cache)

    return call


def latent() -> Callable[[], torch.Tensor]:
    """A batch of latent caches, with a list of even shares."""
    q, cache = (torch.randn(*shape, 576, device="cuda:0").bfloat16() for shape in ((3, 1, 64), (3 * 40, 64, 1)))
    table = torch.arange(3 * 40, dtype=torch.int32, device="cuda:0").view(3, 40)
    lens = torch.tensor([2500, 900, 7], dtype=torch.int32, device="cuda:0")
    return lambda: ck.attention(q, cache, cache[..., :512], page_table=table, seqused_k=lens)


CALLS = {
    "a short prompt": lambda: single_prefill(5, 20, causal=True),
    "many tiles": lambda: single_prefill(3000, 3000, causal=True),
    "split keys": lambda: single_prefill(3, 5000, causal=True),
    "short decode": lambda: single_decode(20),
    "long decode": lambda: single_decode(5000),
    "slopes": lambda: single_decode(5000, pos_encoding_mode="ALIBI"),
    "attention": attention,
    "fused": fused,
    "planned decode": planned_decode,
    "latent": latent,
}


@pytest.fixture
def no_slopes(monkeypatch) -> None:
    """As if no call had asked for slopes yet."""
    monkeypatch.setattr(checks, "_slopes", {})


def live_bytes(pool: torch.cuda.MemPool) -> int:
    blocks = [block for segment in pool.snapshot() for block in segment["blocks"]]
    return sum(block["size"] for block in blocks if block["state"] == "active_allocated")


@pytest.mark.gpu
@pytest.mark.skipif(not hasattr(torch.cuda, "MemPool"), reason="this torch has no torch.cuda.MemPool")
@pytest.mark.parametrize("name", CALLS)
def test_nothing_stays_in_a_pool_of_the_caller(name, no_slopes):
    call = CALLS[name]()
    want = call()
    checks._slopes.clear()
    pool, stream = torch.cuda.MemPool(), torch.cuda.Stream(priority=-1)  # no other test has counters on such a stream
    torch.cuda.synchronize()
    with torch.cuda.stream(stream), torch.cuda.use_mem_pool(pool):
        results = [call() for _ in range(3)]
        torch.cuda.synchronize()
        assert live_bytes(pool) > 0  # of the results
    for result in results:
        assert_bitwise(result, want)
    del result, results
    assert live_bytes(pool) == 0


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos_encoding_mode: str) -> torch.Tensor:
    if q.dim() == 2:
        return ck.single_decode_with_kv_cache(q, k, v, pos_encoding_mode=pos_encoding_mode)
    return ck.single_prefill_with_kv_cache(q, k, v, causal=True, pos_encoding_mode=pos_encoding_mode)


operator = torch.library.custom_op("cutlass_kernels_tests::attend", attend, mutates_args=())


@operator.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos_encoding_mode: str) -> torch.Tensor:
    return torch.empty_like(q)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["decode", "long decode", "prompt", "long prompt"])
@pytest.mark.parametrize("pos_encoding_mode", ["NONE", "ALIBI"])
@pytest.mark.parametrize("captured", [True, False], ids=["captured", "between graphs"])
def test_calls_in_a_compiled_graph(no_slopes, captured, pos_encoding_mode, shape):
    """An engine's own operator is captured with the call inside. A call by itself runs between two graphs."""
    rows, keys = {"decode": (1, 256), "long decode": (1, 5000), "prompt": (128, 128), "long prompt": (3000, 3000)}[
        shape
    ]

    def step(q, k, v):
        call = operator if captured else attend
        return call(q * 2, k, v, pos_encoding_mode) + 1

    batch = make_batch([rows], [keys], *HEADS, device="cuda:0")
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead")
    for turn in range(4):  # the first call warms up, the second records, the others replay
        q = (batch.q[0] if rows == 1 else batch.q) * (1 + turn / 4)
        torch.compiler.cudagraph_mark_step_begin()
        got = compiled(q, batch.k, batch.v).clone()
        torch.testing.assert_close(got, step(q, batch.k, batch.v), rtol=2e-3, atol=2e-3)
    torch._dynamo.reset()


# --- without a GPU ---


@pytest.fixture
def pretend(monkeypatch) -> list[str]:
    """CPU memory in the place of GPU memory, and what happens in which order."""
    seen: list[str] = []
    caller, really_empty = threading.get_ident(), torch.empty

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            seen.append(f"on {self.name}")

        def __exit__(self, *error: object) -> None:
            pass

        def wait_stream(self, other: Stream) -> None:
            seen.append(f"{self.name} waits for {other.name}")

    def empty(size, *, dtype, device):
        seen.append("allocates here" if threading.get_ident() == caller else "allocates elsewhere")
        if size == "too much":
            raise torch.cuda.OutOfMemoryError("no room")
        return really_empty(size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream("default"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("current"))
    return seen


def test_another_thread_allocates_on_the_default_stream(pretend):
    made = native.zeros((3, 2), dtype=torch.int32, device=torch.device("cuda:1"))
    assert made.tolist() == [[0, 0]] * 3 and made.dtype == torch.int32
    assert pretend == ["on default", "allocates elsewhere", "current waits for default"]


def test_the_caller_gets_the_error(pretend):
    with pytest.raises(torch.cuda.OutOfMemoryError, match="no room"):
        native.kept_empty("too much", torch.int32, torch.device("cuda:0"))
    assert pretend == ["on default", "allocates elsewhere"]


def test_offsets_of_decode_steps_are_kept_outside_of_pools(pretend):
    paged_decode._offsets_on.cache_clear()
    made = paged_decode._offsets_on(3, 2, torch.device("cuda:1"), 0, 0)
    assert made.tensor.tolist() == made.host.tolist() == [0, 2, 4, 6] and made.tensor.dtype == torch.int32
    assert pretend == ["on default", "allocates elsewhere", "current waits for default"]
    paged_decode._offsets_on.cache_clear()


def test_room_that_is_kept_is_outside_of_pools(pretend):
    assert kernels.grown_workspace(torch.device("cuda:1"), (8 << 20) + 1).nbytes == 16 << 20
    assert pretend == ["on default", "allocates elsewhere", "current waits for default"]


def test_results_are_the_callers(monkeypatch):
    monkeypatch.setattr(native, "kept_empty", None)
    assert torch.equal(native.zeros((2, 3), dtype=torch.float16, device=CPU), torch.zeros(2, 3, dtype=torch.float16))
