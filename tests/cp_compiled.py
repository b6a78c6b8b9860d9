"""What ranks run in the tests of compiled calls: each function eager and in one graph, on the same tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import cp_calls
import cp_selected
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cutlass_kernels import distributed

LENS = [37, 0, 20, 5]


def prefill(group: Any, device: torch.device, options: dict[str, Any], backend: str = "aot_eager") -> str | None:
    """Of ``LENS`` tokens on all ranks together."""
    generator = torch.Generator().manual_seed(1)
    split = {name: options[name] for name in ("layout", "block_size") if name in options}
    q, k, v = (
        distributed.cp_split(x, group, seqlens=LENS, **split).to(device)
        for x in (torch.randn(sum(LENS), heads, 64, generator=generator).half() for heads in (4, 2, 2))
    )
    given = cp_calls.on(device, options)
    lengths = {"seqlens": options.get("seqlens", LENS)}  # on the host
    given.pop("seqlens", None)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return distributed.cp_prefill(q, k, v, group, **lengths, **given)

    return _compare(call, (q, k, v), backend, "cp_prefill")


def decode(group: Any, device: torch.device, options: dict[str, Any], backend: str = "aot_eager") -> str | None:
    rank = torch.distributed.get_rank(group)
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(3, 2, 8, 64, generator=generator)[:, :, 4 * rank : 4 * rank + 4].half().to(device)
    k, v = (torch.randn(9, 16, 2, 64, generator=generator).half().to(device) for _ in range(2))
    table = torch.randperm(9, generator=generator).view(3, 3).to(device, torch.int32)
    lens = torch.tensor([70, 2, 33], dtype=torch.int32, device=device)
    given = cp_calls.on(device, options)

    def call(*args: torch.Tensor) -> Any:
        q, k, v, table, lens = args
        return distributed.dcp_decode(q, k, v, group, page_table=table, seqused_k=lens, block_size=16, **given)

    return _compare(call, (q, k, v, table, lens), backend, "dcp_decode")


def combine(group: Any, device: torch.device, options: dict[str, Any], backend: str = "aot_eager") -> str | None:
    generator = torch.Generator().manual_seed(3 + torch.distributed.get_rank(group))
    out = torch.randn(5, 4, 64, generator=generator).half().to(device)
    lse = torch.randn(5, 4, generator=generator).to(device)
    call = lambda out, lse: distributed.dcp_combine(out * 2, lse, group, **options)  # noqa: E731
    return _compare(call, (out, lse), backend, "dcp_combine")


def layers(group: Any, device: torch.device, backend: str) -> str | None:
    """Two calls that do not depend on one another, between operations of a compiler's own."""
    torch._inductor.config.compile_threads = 1  # others would outlive this process
    x = torch.randn(10, 4, 64, generator=torch.Generator().manual_seed(4)).half().to(device)

    def call(x: torch.Tensor) -> Any:
        first = distributed.cp_prefill(x * 2, x, x, group, causal=True)
        second = distributed.cp_prefill(x, x + 1, x, group)
        return first + 1, second * 2

    return _compare(call, (x,), backend, "cp_prefill", count=2)


def new_lengths(group: Any, device: torch.device) -> str | None:
    """Other lengths, other shapes: one function, compiled again or with sizes left open."""

    def call(x: torch.Tensor, seqlens: list[int]) -> Any:
        return distributed.cp_prefill(x, x, x, group, seqlens=seqlens, causal=True, return_lse=True)

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for seqlens in ([8, 3], [5, 16], [40, 1], [2, 2]):
        whole = torch.randn(sum(seqlens), 4, 64, generator=torch.Generator().manual_seed(5)).half()
        x = distributed.cp_split(whole, group, seqlens=seqlens).to(device)
        if fault := _differs(compiled(x, seqlens), call(x, seqlens)):
            return f"{seqlens}: {fault}"
    return None


def faulty(group: Any, device: torch.device) -> None:
    """A call whose heads ranks cannot share."""
    x = torch.zeros(4, 3, 64, device=device, dtype=torch.float16)
    torch._dynamo.reset()
    call = lambda x: distributed.dcp_combine(x, x[..., 0].float(), group)  # noqa: E731
    torch.compile(call, fullgraph=True, backend="aot_eager")(x)


def gradient(group: Any, device: torch.device, name: str, compiles: bool) -> None:
    """A backward through a call, whose result must not be taken for a constant."""
    x = torch.ones(4, 2, 64, device=device, dtype=torch.float16, requires_grad=True)
    lens = torch.full((4,), 2, dtype=torch.int32, device=device)
    calls: dict[str, Callable[[torch.Tensor], Any]] = {
        "prefill": lambda x: distributed.cp_prefill(x, x, x, group),
        "decode": lambda x: distributed.dcp_decode(
            x[:, None], *[x.repeat(1, 2, 1)[:, None]] * 2, group, seqused_k=lens
        ),
        "combine": lambda x: distributed.dcp_combine(out=x * 2, lse=x[..., 0].float(), group=group, return_lse=True)[0],
    }
    call = calls[name]
    if compiles:
        torch._dynamo.reset()
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    out = call(x)
    assert out.requires_grad
    out.sum().backward()


def latent_step(group: Any, device: torch.device) -> str | None:
    """A decode step of latent attention (MLA), its last columns in tensors of their own."""
    problem = dict(q_lens=[1, 3, 2], kv_lens=[70, 3, 33], heads=(8, 1, 576), dtype=torch.bfloat16, latent=("q", "k"))
    q, k, _, given = cp_calls.step(group, device, dict(problem, page_size=16), dict(block_size=16), "pages")
    names = [name for name, x in given.items() if isinstance(x, torch.Tensor)]

    def call(q: torch.Tensor, k: torch.Tensor, *tensors: torch.Tensor) -> Any:
        return distributed.dcp_decode(q, k, k, group, block_size=16, **dict(zip(names, tensors, strict=True)))

    return _compare(call, (q, k, *(given[name] for name in names)), "aot_eager", "dcp_decode")


def selected_step(group: Any, device: torch.device) -> str | None:
    """A step by lists, which the graph makes, over tokens of 656 bytes."""
    rank, world = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    problem = dict(kv_lens=[70, 33], rows=4, width=20, shard=(world, 4), heads=4, quantized=True)
    q, cache, _ = cp_selected.step(device, problem, rank)
    table = torch.arange(cache.size(0), dtype=torch.int32, device=device).view(2, -1)
    positions = cp_selected.make(problem).positions.to(device)
    given = dict(block_size=4, page_size=cp_selected.PAGE)

    def call(q: torch.Tensor, cache: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> Any:
        own: Any = distributed.dcp_local_indices(positions, rank, world, page_table=table, **given)
        lists = dict(kv_indices_per_token=own[0].unsqueeze(1), topk_length=own[1])
        return distributed.dcp_decode(q, cache, cache, group, return_lse=True, **lists)

    cache[cache == 255] = 0  # tokens that are not there: no NaN
    return _compare(call, (q.chunk(world, 1)[rank], cache, positions, table), "aot_eager", "dcp_decode")


def shapes(group: Any, device: torch.device) -> None:
    """Fake tensors are computed without communication: here rank 0 alone calls."""
    if torch.distributed.get_rank(group):
        return
    with FakeTensorMode():
        q, k = (torch.zeros(6, heads, 64, device=device, dtype=torch.float16) for heads in (4, 2))
        out, lse = distributed.cp_prefill(q, k, k[..., :32], group, return_lse=True, o_dtype=torch.bfloat16)
        assert (out.shape, lse.shape, out.dtype) == ((6, 4, 32), (6, 4), torch.bfloat16)
        out, lse = distributed.dcp_combine(q, q[..., 0].float(), group, return_lse=True)
        assert (out.shape, lse.shape, out.dtype) == ((6, 2, 64), (6, 2), torch.float16)
        lens = torch.zeros(6, device=device, dtype=torch.int32)
        out = distributed.dcp_decode(q[:, None], k[:, None], k[:, None], group, seqused_k=lens)
        assert (out.shape, out.dtype) == ((6, 1, 4, 64), torch.float16)
        with pytest.raises(TypeError, match=r"dcp_combine\(\) has the parameters out, lse, group"):
            distributed.dcp_combine(q, q[..., 0].float(), group, return_lses=True)


def replayed(group: Any, device: torch.device) -> str | None:
    """As ``mode="reduce-overhead"`` compiles it: CUDA graphs around the calls."""
    x = torch.randn(10, 4, 64, generator=torch.Generator().manual_seed(6)).half().to(device)

    def call(x: torch.Tensor) -> Any:
        out = distributed.cp_prefill(x * 2, x, x, group, causal=True) + 1
        return distributed.dcp_combine(out, out[..., 0].float(), group) * 2

    torch._dynamo.reset()
    want = call(x)
    compiled = torch.compile(call, fullgraph=True, mode="reduce-overhead")
    for _ in range(5):
        if fault := _differs(compiled(x).clone(), want):
            return fault
    return None


def _compare(call: Callable[..., Any], args: tuple[Any, ...], backend: str, name: str, count: int = 1) -> str | None:
    """What is wrong."""
    torch._dynamo.reset()
    want, found = call(*args), []

    def counting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        found.extend(str(node.target) for node in graph.graph.nodes if "cutlass_kernels" in str(node.target))
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    compiled = torch.compile(call, fullgraph=True, backend=counting)
    for _ in range(2):
        if fault := _differs(compiled(*args), want):
            return fault
    return None if len(found) == count and all(name in x for x in found) else f"the graph holds {found}"


def _differs(got: Any, want: Any) -> str | None:
    got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    for a, b in zip(got, want, strict=True):
        if (a.shape, a.dtype, a.stride()) != (b.shape, b.dtype, b.stride()):
            return f"{tuple(a.shape)} of {a.dtype}, not {tuple(b.shape)} of {b.dtype}"
        if not torch.equal(a, b):
            return f"differs by {float((a - b).abs().max()):.3g}"
        if not math.isfinite(float(a[a != -math.inf].float().abs().sum())):
            return "is not finite"
    return None
