"""Steps of vLLM on its own classes: layers, cache views, metadata and forward context; results against the oracle.

Imported only where vLLM is installed.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import oracle
import torch
from compare import assert_close
from vllm.config import CacheConfig, DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import (
    EncoderOnlyAttentionSpec,
    KVCacheTensor,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from cutlass_kernels.integrations.vllm.backend import CutlassKernelsBackend

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 64, 16
NAME = "model.layers.1.attn"


def config(cache_dtype: str = "auto", **parallel: Any) -> VllmConfig:
    made = VllmConfig(device_config=DeviceConfig(device="cpu"), cache_config=CacheConfig(cache_dtype=cache_dtype))
    for name, value in parallel.items():
        setattr(made.parallel_config, name, value)
    return made


@dataclass
class Expected:
    """What the oracle takes beside queries, keys and values."""

    window: int | None = None  # of vLLM, with the row's own key
    causal: bool = True
    chunk_size: int = 0
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    alibi: bool = False
    scale: float = 0.11


@dataclass
class Steps:
    """A layer of vLLM with its cache, and requests that grow."""

    expected: Expected = field(default_factory=Expected)
    layout: KVCacheLayout = KVCacheLayout.LBNHC
    dtype: torch.dtype = torch.float16
    cache_dtype: str = "auto"
    scales: tuple[Any, Any] = (1.0, 1.0)  # of an fp8 cache, numbers or one per head
    backend: Any = CutlassKernelsBackend
    layer_class: Any = Attention
    blocks: int = 48
    kv_heads: int = KV_HEADS

    def __post_init__(self) -> None:
        e = self.expected
        self.config = config(self.cache_dtype)
        given: dict[str, Any] = dict(prefix=NAME, cache_config=self.config.cache_config)
        given |= dict(per_layer_sliding_window=e.window) if e.window else {}
        given |= dict(sinks=torch.nn.Parameter(e.sinks.to(self.dtype), False)) if e.sinks is not None else {}
        given |= dict(alibi_slopes=oracle.alibi_slopes(HEADS)) if e.alibi else {}
        if self.layer_class is Attention:
            given["attn_backend"] = self.backend
        torch.set_default_dtype(self.dtype)
        try:
            with set_current_vllm_config(self.config):
                self.layer = self.layer_class(
                    HEADS, DIM, e.scale, num_kv_heads=self.kv_heads, logits_soft_cap=e.soft_cap, **given
                )
                self.layer.process_weights_after_loading(self.dtype)
        finally:
            torch.set_default_dtype(torch.float32)
        self.layer._k_scale, self.layer._v_scale = (torch.tensor(x, dtype=torch.float32) for x in self.scales)
        spec = self.layer.get_kv_cache_spec(self.config)
        self.spec = spec or EncoderOnlyAttentionSpec(BLOCK, num_kv_heads=self.kv_heads, head_size=DIM, dtype=self.dtype)
        self.builder = self.layer.attn_backend.get_builder_cls()(self.spec, [NAME], self.config, torch.device("cpu"))
        if spec is not None:
            self.layer.kv_cache = self._cache()
        self.free = list(range(1, self.blocks))  # vLLM keeps block 0 for padding
        random.Random(0).shuffle(self.free)
        self.requests: dict[int, Request] = {}

    def _cache(self) -> torch.Tensor:
        """The view of layer 1 of 3, all of whose bytes are NaN."""
        strides = compute_layout_strides(self.spec, self.blocks, 3, self.layout)
        place = KVCacheTensor(size=0, layers=["0", NAME, "2"], layer_stride=strides[0], block_stride=strides[1])
        raw = torch.full((3 * self.blocks * self.spec.page_size_bytes,), -1, dtype=torch.int8)
        return create_kv_cache_views(raw, self.spec, self.blocks, self.layout, place)[1]

    def kept(self, x: torch.Tensor, scale: Any) -> torch.Tensor:
        """What the cache holds of ``x [tokens, heads, dim]``."""
        if not self.cache_dtype.startswith("fp8"):
            return x
        factor = torch.tensor(scale, dtype=torch.float32).reshape(-1, 1)
        return (x.float() / factor).clamp(-448, 448).to(torch.float8_e4m3fn).float() * factor

    def step(self, lengths: dict[int, int], padding: int = 0) -> Any:
        """New tokens of some requests: ``lengths`` by request. Returns the metadata; asserts on the output."""
        generator = torch.Generator().manual_seed(sum(lengths) + 7 * sum(lengths.values()))
        count = sum(lengths.values())
        q, k, v = (
            torch.randn(count + padding, heads, DIM, generator=generator).to(self.dtype)
            for heads in (HEADS, self.kv_heads, self.kv_heads)
        )
        slots, starts = [], [0]
        for request, n in lengths.items():
            mine = self.requests.setdefault(request, Request())
            first = starts[-1]
            mine.add(self.kept(k[first : first + n], self.scales[0]), self.kept(v[first : first + n], self.scales[1]))
            slots += mine.slots(n, self.free)
            starts.append(first + n)
        common = self.common(list(lengths), starts, slots, padding)
        metadata = self.builder.build(0, common)
        out = self.run(q, k, v, metadata, common.slot_mapping)
        for place, request in enumerate(lengths):
            rows = slice(starts[place], starts[place + 1])
            self.check(out[rows], q[rows], *self.requests[request].tokens())
        return metadata

    def common(self, requests: list[int], starts: list[int], slots: list[int], padding: int) -> CommonAttentionMetadata:
        """As the model runner makes it. With ``padding``, of a full graph: more tokens, and a request without any."""
        lens = [len(self.requests[x].keys) for x in requests]
        tables = [self.requests[x].blocks for x in requests]
        if padding:
            starts, lens, tables, slots = [*starts, starts[-1]], [*lens, 0], [*tables, []], slots + [-1] * padding
        most = max(map(len, tables)) + 2
        table = torch.tensor([x + [0] * (most - len(x)) for x in tables], dtype=torch.int32)
        ints = lambda x: torch.tensor(x, dtype=torch.int32)  # noqa: E731
        return CommonAttentionMetadata(
            query_start_loc=ints(starts),
            query_start_loc_cpu=ints(starts),
            seq_lens=ints(lens),
            seq_lens_cpu_upper_bound=ints(lens),
            num_reqs=len(lens),
            num_actual_tokens=len(slots),
            max_query_len=max(b - a for a, b in itertools.pairwise(starts)),
            max_seq_len=max(lens),
            block_table_tensor=table,
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            causal=self.expected.causal,
        )

    def run(self, q: Any, k: Any, v: Any, metadata: Any, slots: torch.Tensor) -> torch.Tensor:
        """The layer's own forward(): vLLM updates the cache and calls the backend."""
        with set_forward_context({NAME: metadata}, self.config, slot_mapping={NAME: slots}):
            out = self.layer(*(x.flatten(1) for x in (q, k, v)))
        return out.unflatten(1, (HEADS, DIM))

    def check(self, out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        assert_close(out, expect(self.expected, q, k, v).out)


@dataclass
class Request:
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)

    def add(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self.keys += k.unbind(0)
        self.values += v.unbind(0)

    def slots(self, new: int, free: list[int]) -> list[int]:
        """Of the newest tokens; takes blocks as they are needed."""
        while len(self.blocks) * BLOCK < len(self.keys):
            self.blocks.append(free.pop())
        return [self.blocks[x // BLOCK] * BLOCK + x % BLOCK for x in range(len(self.keys) - new, len(self.keys))]

    def tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.stack(self.keys), torch.stack(self.values)


def expect(e: Expected, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> oracle.State:
    side = -1 if e.window is None else e.window - 1
    mask = oracle.visible(
        len(q),
        len(k),
        causal=e.causal,
        window_left=side,
        window_right=-1 if e.causal else side,
        chunk_size=e.chunk_size,
    )
    return oracle.attention(
        q,
        k,
        v,
        mask=mask,
        sm_scale=e.scale,
        soft_cap=e.soft_cap,
        sinks=e.sinks,
        alibi="relative" if e.alibi else None,
    )


class Ranks:
    """Decode context parallelism: one Steps per rank, with all query heads gathered and partial results combined by
    vLLM's own arithmetic in place of its communication."""

    def __init__(self, world: int, interleave: int, expected: Expected, cache_dtype: str = "auto") -> None:
        self.world, self.interleave, self.expected = world, interleave, expected
        self.ranks = [self._rank(r, cache_dtype) for r in range(world)]

    def _rank(self, rank: int, cache_dtype: str) -> Steps:
        # Ranks of a group hold the same heads of K and V: one each, as every head would lie on ranks of its own first.
        steps = Steps(Expected(sinks=None, scale=self.expected.scale), cache_dtype=cache_dtype, kv_heads=1)
        steps.layer.impl.dcp_world_size, steps.layer.impl.dcp_rank = self.world, rank
        if self.expected.sinks is not None:
            steps.layer.impl.sinks = self.expected.sinks[rank * HEADS : (rank + 1) * HEADS]
        builder, settings = steps.builder, steps.config.parallel_config
        settings.cp_kv_cache_interleave_size = self.interleave
        type(builder).__init__(builder, steps.spec, [NAME], steps.config, torch.device("cpu"))
        builder.dcp_world_size, builder.dcp_rank = self.world, rank
        builder.context_lens = torch.zeros(256, dtype=torch.int32)
        return steps

    def owner(self, position: int) -> int:
        return position // self.interleave % self.world

    def step(self, monkeypatch: Any, lengths: dict[int, int]) -> list[Any]:
        from vllm.v1.attention.ops.dcp import _lse_weighted_combine

        from cutlass_kernels.integrations.vllm import context_parallel

        count, starts = sum(lengths.values()), [0]
        generator = torch.Generator().manual_seed(count)
        k, v = torch.randn(2, count, 1, DIM, generator=generator).half().unbind(0)
        q = torch.randn(self.world, count, HEADS, DIM, generator=generator).half()
        for n in lengths.values():
            starts.append(starts[-1] + n)
        group = SimpleNamespace(world_size=self.world, all_gather=lambda x, dim: torch.cat(list(q), dim))
        monkeypatch.setattr(context_parallel, "get_dcp_group", lambda: group)
        built = [self._place(steps, rank, lengths, starts, k, v) for rank, steps in enumerate(self.ranks)]
        partial: list[Any] = []

        def run(rank: int, combine: Any) -> torch.Tensor:
            steps = self.ranks[rank]
            steps.layer.impl.combine = combine
            return steps.run(q[rank], k, v, *built[rank])

        def record(out: torch.Tensor, lse: torch.Tensor, group: Any, **options: Any) -> Any:
            assert options == dict(return_lse=True, is_lse_base_on_e=False)
            partial.append((out.clone(), lse.clone()))
            return out[:, :HEADS], lse[:, :HEADS]

        for rank in range(self.world):
            run(rank, record)

        def combine_for(rank: int) -> Any:
            def combine(out: torch.Tensor, lse: torch.Tensor, group: Any, **options: Any) -> Any:
                mine = slice(rank * HEADS, (rank + 1) * HEADS)
                outs, lses = (torch.stack([x[i][:, mine] for x in partial]) for i in (0, 1))
                return _lse_weighted_combine(outs, lses, return_lse=True, is_lse_base_on_e=False)

            return combine

        for rank in range(self.world):
            out = run(rank, combine_for(rank))
            for place, request in enumerate(lengths):
                rows = slice(starts[place], starts[place + 1])
                e = self.expected
                sinks = None if e.sinks is None else e.sinks[rank * HEADS : (rank + 1) * HEADS]
                # Keys of this step are not read from the cache, so that fp8 does not round them.
                keys = [
                    torch.cat([old[: len(old) - lengths[request]].float(), new[rows].float()])
                    for old, new in zip(self.whole[request].tokens(), (k, v))
                ]
                want = expect(Expected(scale=e.scale, sinks=sinks), q[rank, rows], *keys)
                assert_close(out[rows], want.out, atol=2e-3)
        return [x[0] for x in built]

    @property
    def whole(self) -> dict[int, Request]:
        return self.__dict__.setdefault("_whole", {})

    def _place(self, steps: Steps, rank: int, lengths: Any, starts: list[int], k: Any, v: Any) -> tuple[Any, Any]:
        """Metadata of a rank, whose cache holds every key that it owns: the others have no slot there."""
        slots: list[int] = []
        for place, (request, n) in enumerate(lengths.items()):
            whole, mine = self.whole.setdefault(request, Request()), steps.requests.setdefault(request, Request())
            rows = slice(starts[place], starts[place + 1])
            if rank == 0:
                kept = [steps.kept(x[rows], 1.0) for x in (k, v)]
                whole.add(*kept)
            for position in range(len(whole.keys) - n, len(whole.keys)):
                if self.owner(position) != rank:
                    slots.append(-1)
                    continue
                mine.add(whole.keys[position][None], whole.values[position][None])
                slots += mine.slots(1, steps.free)
        common = steps.common(list(lengths), starts, slots, 0)
        lens = torch.tensor([len(self.whole[x].keys) for x in lengths], dtype=torch.int32)
        common = common.replace(seq_lens=lens, seq_lens_cpu_upper_bound=lens, max_seq_len=int(lens.max()))
        return steps.builder.build(0, common), common.slot_mapping
