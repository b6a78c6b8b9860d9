"""The kernel of ``ranks.h``. On one GPU, ranks are memories and streams: their kernels run beside one another."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cutlass_kernels._core import native

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
TIMEOUT = 5_000_000_000  # nanoseconds
SIZES = [(3, 64), (40, 128), (1, 8), (17, 256)]  # tokens and head_dim, one call after another


class Ranks:
    """Of one GPU."""

    def __init__(self, world: int, size: int) -> None:
        self.memory = [torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(world)]
        self.streams = [torch.cuda.Stream() for _ in range(world)]

    def call(self, name: str, arguments: list[tuple[Any, ...]]) -> None:
        """``arguments``: of each rank, as far as the memory."""
        torch.cuda.synchronize()  # arguments were made on another stream
        addresses = [x.data_ptr() for x in self.memory]
        for rank, (given, stream) in enumerate(zip(arguments, self.streams)):
            where = (rank, addresses, self.memory[0].numel(), TIMEOUT, stream.cuda_stream)
            getattr(native._C, name)(*given, *where)
        torch.cuda.synchronize()


def heads_first(*shape: int) -> torch.Tensor:
    """``[tokens, heads, ...]``, of strides that are not those of a contiguous tensor."""
    return torch.randn(shape[1], shape[0], *shape[2:], device="cuda").transpose(0, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_combine(dtype, world, scatter):
    heads = 12
    ranks = Ranks(world, max(native._C.exchange_bytes(dtype, n, heads, dim, world, scatter) for n, dim in SIZES))
    for tokens, dim in SIZES:
        v = [heads_first(tokens, heads, dim).to(DTYPES[dtype]) for _ in range(world)]
        s = [heads_first(tokens, heads) * 4 for _ in range(world)]
        for rank in range(world):
            s[rank][torch.rand(tokens, heads, device="cuda") < 0.3] = -math.inf
            v[rank][s[rank] == -math.inf] = math.nan
        own = heads // world if scatter else heads
        merged = [v[0].new_full((tokens, own, dim), math.nan) for _ in range(world)]
        lse = [s[0].new_full((tokens, own), math.nan) for _ in range(world)]
        sizes = dtype, tokens, heads, dim
        states = [(x.data_ptr(), *x.stride()[:2], y.data_ptr(), *y.stride()) for x, y in zip(v, s)]
        results = [(scatter, x.data_ptr(), y.data_ptr()) for x, y in zip(merged, lse)]
        ranks.call("combine_ranks", [(*sizes, *x, *y) for x, y in zip(states, results)])
        logits = torch.stack(s).double() * math.log(2)
        total = logits.logsumexp(0)
        weight = torch.where(logits == -math.inf, 0, (logits - total).exp())[..., None]
        want = torch.where(weight == 0, 0, torch.stack(v).double() * weight).sum(0)
        bound = 1e-5 if dtype == "float32" else 4 * torch.finfo(DTYPES[dtype]).eps
        for rank in range(world):
            mine = slice(rank * own, (rank + 1) * own) if scatter else slice(None)
            torch.testing.assert_close(merged[rank].double(), want[:, mine], atol=bound, rtol=bound)
            torch.testing.assert_close(lse[rank].double(), total[:, mine] / math.log(2), atol=1e-4, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gather(dtype, world):
    heads = 3
    ranks = Ranks(world, max(native._C.exchange_bytes(dtype, n, heads, dim, world, False) for n, dim in SIZES))
    for tokens, dim in SIZES:
        x = [heads_first(tokens, heads, dim).to(DTYPES[dtype]) for _ in range(world)]
        whole = [x[0].new_full((tokens, heads * world, dim), math.nan) for _ in range(world)]
        sizes = dtype, tokens, heads, dim
        parts = [(a.data_ptr(), *a.stride()[:2], b.data_ptr()) for a, b in zip(x, whole)]
        ranks.call("gather_heads", [(*sizes, *part) for part in parts])
        for found in whole:
            assert torch.equal(found, torch.cat(x, 1))


GOOD: dict[str, Any] = dict(
    dtype="float16", tokens=4, heads=8, head_dim=64, v=1 << 20, v_st=512, v_sh=64, s=1 << 20, s_st=8, s_sh=1
) | dict(scatter=True, merged_v=1 << 20, merged_s=0, rank=0, memory=[1 << 20, 1 << 21], bytes=1 << 20)


@pytest.mark.runs_nothing("arguments are refused before a kernel starts")
@pytest.mark.parametrize(
    "given, told",
    [
        (dict(rank=2), r"rank=2 of world=2: rank must lie between 0 and world - 1, and world between 1 and 16"),
        (dict(memory=[1 << 20] * 17), r"rank=0 of world=17: rank must"),
        (dict(memory=[]), r"rank=0 of world=0: rank must"),
        (dict(memory=[1 << 20, 0]), r"ranks.memory\[1\] is null, or not 128-byte aligned"),
        (dict(memory=[(1 << 20) + 64, 1 << 21]), r"ranks.memory\[0\] is null, or not 128-byte aligned"),
        (dict(bytes=1000), r"ranks.bytes=1000 must be at least \d+: see exchange_bytes"),
        (dict(dtype="float8_e4m3fn"), r"dtype=float8_e4m3fn is not exchanged between ranks"),
        (dict(head_dim=60), r"head_dim=60 must be positive, and rows of a head a multiple of 16 bytes"),
        (dict(tokens=-1), r"num_tokens=-1, num_heads=8"),
        (dict(tokens=1 << 40, bytes=1 << 62), r"num_tokens=1099511627776 are too many for one call"),
        (dict(heads=7), r"num_heads=7 is no multiple of world=2: set scatter_heads to false"),
        (dict(v=0), r"v is null, or has an address or strides that are no multiples of 16 bytes"),
        (dict(v_sh=60), r"v is null, or has an address or strides"),
        (dict(merged_v=8), r"merged_v is null, or has an address"),
        (dict(s=0), r"s is null: the LSE is needed"),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else "",
)
def test_refusals(given, told):
    if native._C is None:
        pytest.skip("the extension is not built")
    arguments = GOOD | given
    with pytest.raises(ValueError, match=told):
        native._C.combine_ranks(*arguments.values(), TIMEOUT, 0)
