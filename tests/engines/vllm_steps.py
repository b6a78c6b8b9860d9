"""Steps of vLLM on its own classes: layers, cache views, metadata and forward context; results against the oracle.

Imported only where vLLM is installed.
"""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from compare import assert_close
from engine_steps import DIM, HEADS, KV_HEADS, Expected, Requests
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

BLOCK = 16
NAME = "model.layers.1.attn"


def config(cache_dtype: str = "auto", **parallel: Any) -> VllmConfig:
    made = VllmConfig(device_config=DeviceConfig(device="cpu"), cache_config=CacheConfig(cache_dtype=cache_dtype))
    for name, value in parallel.items():
        setattr(made.parallel_config, name, value)
    return made


class Steps(Requests):
    """A layer of vLLM with its cache, and requests that grow."""

    def __init__(
        self,
        expected: Expected | None = None,
        layout: KVCacheLayout = KVCacheLayout.LBNHC,
        dtype: torch.dtype = torch.float16,
        cache_dtype: str = "auto",
        scales: tuple[Any, Any] = (1.0, 1.0),  # of an fp8 cache, numbers or one per head
        backend: Any = CutlassKernelsBackend,
        layer_class: Any = Attention,
        kv_heads: int = KV_HEADS,
    ) -> None:
        super().__init__(expected or Expected(), dtype)
        self.layout, self.cache_dtype, self.scales, self.kv_heads = layout, cache_dtype, scales, kv_heads
        self.total = 48  # blocks
        self.config, e = config(cache_dtype), self.expected
        given: dict[str, Any] = dict(prefix=NAME, cache_config=self.config.cache_config)
        given |= dict(per_layer_sliding_window=e.window + 1) if e.window >= 0 else {}  # vLLM counts the row's own key
        given |= dict(sinks=torch.nn.Parameter(e.sinks.to(dtype), False)) if e.sinks is not None else {}
        given |= dict(alibi_slopes=oracle.alibi_slopes(HEADS)) if e.alibi else {}
        if layer_class is Attention:
            given["attn_backend"] = backend
        torch.set_default_dtype(dtype)
        try:
            with set_current_vllm_config(self.config):
                self.layer = layer_class(
                    HEADS, DIM, e.scale, num_kv_heads=kv_heads, logits_soft_cap=e.soft_cap, **given
                )
                self.layer.process_weights_after_loading(dtype)
        finally:
            torch.set_default_dtype(torch.float32)
        self.layer._k_scale, self.layer._v_scale = (torch.tensor(x, dtype=torch.float32) for x in scales)
        spec = self.layer.get_kv_cache_spec(self.config)
        self.spec = spec or EncoderOnlyAttentionSpec(BLOCK, num_kv_heads=kv_heads, head_size=DIM, dtype=dtype)
        self.builder = self.layer.attn_backend.get_builder_cls()(self.spec, [NAME], self.config, torch.device("cpu"))
        if spec is not None:
            self.layer.kv_cache = self._cache()
        self.free = list(range(1, self.total))  # vLLM keeps block 0 for padding
        random.Random(0).shuffle(self.free)
        self.blocks: dict[int, list[int]] = {}

    def _cache(self) -> torch.Tensor:
        """The view of layer 1 of 3, all of whose bytes are NaN."""
        strides = compute_layout_strides(self.spec, self.total, 3, self.layout)
        place = KVCacheTensor(size=0, layers=["0", NAME, "2"], layer_stride=strides[0], block_stride=strides[1])
        raw = torch.full((3 * self.total * self.spec.page_size_bytes,), -1, dtype=torch.int8)
        return create_kv_cache_views(raw, self.spec, self.total, self.layout, place)[1]

    def kept(self, x: torch.Tensor, index: int) -> torch.Tensor:
        if not self.cache_dtype.startswith("fp8"):
            return x
        factor = torch.tensor(self.scales[index], dtype=torch.float32).reshape(-1, 1)
        return (x.float() / factor).clamp(-448, 448).to(torch.float8_e4m3fn).float() * factor

    def place(self, request: int, new: int) -> list[int]:
        """Takes blocks as they are needed."""
        blocks, have = self.blocks.setdefault(request, []), self.length(request)
        while len(blocks) * BLOCK < have + new:
            blocks.append(self.free.pop())
        return [blocks[x // BLOCK] * BLOCK + x % BLOCK for x in range(have, have + new)]

    def step(self, lengths: dict[int, int], padding: int = 0) -> Any:
        """Returns the metadata."""
        slots, q, k, v = self.grow(lengths, padding)
        common = self.common(list(lengths), [0, *itertools.accumulate(lengths.values())], slots, padding)
        metadata = self.builder.build(0, common)
        out, count = self.run(q, k, v, metadata, common.slot_mapping), len(slots)
        self.check(out[:count], q[:count], lengths)
        return metadata

    def common(self, requests: list[int], starts: list[int], slots: list[int], padding: int) -> CommonAttentionMetadata:
        """As the model runner makes it. With ``padding``, of a full graph: more tokens, and a request without any."""
        lens = [self.length(x) for x in requests]
        tables = [self.blocks[x] for x in requests]
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


class Ranks(Requests):
    """Decode context parallelism: one Steps per rank, with all query heads gathered and partial results combined by
    vLLM's own arithmetic in place of its communication."""

    kv_heads = 1

    def __init__(self, world: int, interleave: int, expected: Expected, cache_dtype: str = "auto") -> None:
        super().__init__(expected, torch.float16)
        self.world, self.interleave = world, interleave
        self.ranks = [self._rank(r, cache_dtype) for r in range(world)]

    def _rank(self, rank: int, cache_dtype: str) -> Steps:
        # Ranks of a group hold the same heads of K and V: one each, as every head would lie on ranks of its own first.
        steps = Steps(Expected(scale=self.expected.scale), cache_dtype=cache_dtype, kv_heads=1)
        steps.layer.impl.dcp_world_size, steps.layer.impl.dcp_rank = self.world, rank
        if self.expected.sinks is not None:
            steps.layer.impl.sinks = self.expected.sinks[rank * HEADS : (rank + 1) * HEADS]
        builder, settings = steps.builder, steps.config.parallel_config
        settings.cp_kv_cache_interleave_size = self.interleave
        type(builder).__init__(builder, steps.spec, [NAME], steps.config, torch.device("cpu"))
        builder.dcp_world_size, builder.dcp_rank = self.world, rank
        builder.context_lens = torch.zeros(256, dtype=torch.int32)
        return steps

    def kept(self, x: torch.Tensor, index: int) -> torch.Tensor:
        return self.ranks[0].kept(x, index)

    def place(self, request: int, new: int) -> list[int]:
        """Ranks that own the tokens."""
        have = self.length(request)
        return [x // self.interleave % self.world for x in range(have, have + new)]

    def step(self, lengths: dict[int, int]) -> list[Any]:
        with pytest.MonkeyPatch.context() as monkeypatch:
            return self._step(monkeypatch, lengths)

    def _step(self, monkeypatch: pytest.MonkeyPatch, lengths: dict[int, int]) -> list[Any]:
        from vllm.v1.attention.ops.dcp import _lse_weighted_combine

        from cutlass_kernels.integrations.vllm import context_parallel

        owners, _, k, v = self.grow(lengths)
        starts = [0, *itertools.accumulate(lengths.values())]
        q = torch.stack([self.randn(len(owners), HEADS) for _ in range(self.world)])
        group = SimpleNamespace(world_size=self.world, all_gather=lambda x, dim: torch.cat(list(q), dim))
        monkeypatch.setattr(context_parallel, "get_dcp_group", lambda: group)
        of_ranks = ([x == rank for x in owners] for rank in range(self.world))
        built = [self._build(steps, lengths, starts, owned) for steps, owned in zip(self.ranks, of_ranks)]
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
                    torch.cat([held[request][: -lengths[request]].float(), new[rows].float()])
                    for held, new in ((self.keys, k), (self.values, v))
                ]
                want = Expected(scale=e.scale, sinks=sinks).attend(q[rank, rows], *keys, None)
                assert_close(out[rows], want, atol=2e-3)
        return [x[0] for x in built]

    def _build(self, steps: Steps, lengths: dict[int, int], starts: list[int], owned: list[bool]) -> tuple[Any, Any]:
        """Metadata of a rank, whose cache holds every key that it owns: the others have no slot there."""
        slots = [-1] * len(owned)
        for request, (begin, end) in zip(lengths, itertools.pairwise(starts)):
            steps.blocks.setdefault(request, [])
            for row in range(begin, end):
                if owned[row]:
                    (slots[row],) = steps.place(request, 1)
                    at = self.length(request) - end + row
                    steps.remember({request: 1}, *(x[request][at, None] for x in (self.keys, self.values)))
        common = steps.common(list(lengths), starts, slots, 0)
        lens = torch.tensor([self.length(x) for x in lengths], dtype=torch.int32)
        common = common.replace(seq_lens=lens, seq_lens_cpu_upper_bound=lens, max_seq_len=int(lens.max()))
        return steps.builder.build(0, common), common.slot_mapping
