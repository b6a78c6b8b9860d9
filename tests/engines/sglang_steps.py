"""Steps of SGLang on its own classes: layers, pools, batches and speculative inputs; results against the oracle.

Imported only where SGLang is installed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import oracle
import torch
from compare import assert_close
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.eagle_info import EagleVerifyInput

from cutlass_kernels.integrations.sglang import backend as ours

HEADS, KV_HEADS, DIM, CONTEXT = 4, 2, 64, 128


@dataclass
class Expected:
    """What the oracle takes beside queries, keys and values. A window of SGLang does not count the row's own key."""

    window: int = -1
    causal: bool = True
    chunk_size: int = 0
    soft_cap: float = 0.0
    sinks: torch.Tensor | None = None
    scale: float = 0.11


def publish(monkeypatch: Any, *, topk: int = 0, drafts: int = 0, steps: int = 0, dcp: int = 1, invariant: bool = False):
    """What a server's arguments say, as the backend asks for it."""
    spec = dict(speculative_eagle_topk=topk, speculative_num_draft_tokens=drafts, speculative_num_steps=steps)
    exact = SimpleNamespace(enable_deterministic_inference=invariant)
    monkeypatch.setattr(ours, "get_spec", lambda: SimpleNamespace(**spec))
    monkeypatch.setattr(ours, "get_parallel", lambda: SimpleNamespace(attn_dcp_size=dcp, attn_cp_size=1))
    monkeypatch.setattr(ours, "get_exec", lambda: SimpleNamespace(deterministic=exact))


@dataclass
class Steps:
    """A backend with a layer and a pool, and requests that grow. Token ids of a request are its pages', in order."""

    expected: Expected = field(default_factory=Expected)
    page_size: int = 1
    dtype: torch.dtype = torch.float16
    cache_dtype: torch.dtype | None = None
    scales: tuple[float, float] | None = None
    has_window_pool: bool = False
    make: Any = None  # of a backend, from a runner

    def __post_init__(self) -> None:
        e, size = self.expected, 1024
        self.cache_dtype = self.cache_dtype or self.dtype
        kind = AttentionType.DECODER if e.causal else AttentionType.ENCODER_ONLY
        self.layer = RadixAttention(
            HEADS,
            DIM,
            e.scale,
            KV_HEADS,
            layer_id=0,
            logit_cap=e.soft_cap,
            sliding_window_size=e.window,
            attn_type=kind,
            use_irope=e.chunk_size > 0,
        )
        if self.scales is not None:
            self.layer.k_scale, self.layer.v_scale = (torch.tensor([x]) for x in self.scales)
        common = dict(
            size=size,
            page_size=self.page_size,
            dtype=self.cache_dtype,
            head_num=KV_HEADS,
            head_dim=DIM,
            device="cpu",
            enable_memory_saver=False,
        )
        self.swap = torch.arange(size + self.page_size)
        if self.has_window_pool:
            self.pool = SWAKVPool(**common, size_swa=size, swa_attention_layer_ids=[0], full_attention_layer_ids=[1])
            pages = torch.randperm(size // self.page_size, generator=torch.Generator().manual_seed(1)) + 1
            pages = torch.cat([torch.zeros(1, dtype=torch.int64), pages])
            self.swap = (pages[:, None] * self.page_size + torch.arange(self.page_size)).flatten()
            self.pool.register_mapping(self.swap)
        else:
            self.pool = MHATokenToKVPool(**common, layer_num=1, enable_alt_stream=False)
        self.table = ReqToTokenPool(size=16, max_context_len=CONTEXT, device="cpu", enable_memory_saver=False)
        self.runner = SimpleNamespace(
            device="cpu",
            page_size=self.page_size,
            model_config=SimpleNamespace(context_len=CONTEXT, is_encoder_decoder=False),
            req_to_token_pool=self.table,
            token_to_kv_pool=self.pool,
            kv_index_translator=None,
            kv_cache_dtype=self.cache_dtype,
            sliding_window_size=e.window if e.window >= 0 else None,
            attention_chunk_size=e.chunk_size or None,
            use_mla_backend=False,
        )
        self.backend = (self.make or ours.CutlassKernelsBackend)(self.runner)
        self.free = list(range(1, size // self.page_size))
        random.Random(0).shuffle(self.free)
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.generator = torch.Generator().manual_seed(0)

    def randn(self, count: int, heads: int) -> torch.Tensor:
        return torch.randn(count, heads, DIM, generator=self.generator).to(self.dtype)

    def kept(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """What the cache holds of ``x [tokens, heads, dim]``."""
        if self.cache_dtype == self.dtype:
            return x
        scale = 1.0 if self.scales is None else self.scales[index]
        return (x / scale).to(self.cache_dtype).float() * scale

    def place(self, request: int, new: int) -> list[int]:
        """Token ids of the next ``new`` tokens of a request, which its row of the table gets, too."""
        row, have = self.table.req_to_token[request], self.length(request)
        for position in range(have, have + new):
            if position % self.page_size == 0:
                row[position] = self.free.pop() * self.page_size
            else:
                row[position] = row[position - 1] + 1
        return row[have : have + new].tolist()

    def length(self, request: int) -> int:
        return len(self.keys.get(request, ()))

    def batch(self, mode: ForwardMode, requests: list[int], lens: list[int], slots: list[int], **more: Any) -> Any:
        lengths = torch.tensor(lens, dtype=torch.int64)
        return ForwardBatch(
            forward_mode=mode,
            batch_size=len(requests),
            input_ids=torch.zeros(len(slots), dtype=torch.int64),
            req_pool_indices=torch.tensor(requests, dtype=torch.int64),
            seq_lens=lengths,
            seq_lens_cpu=lengths.clone(),
            out_cache_loc=torch.tensor(slots, dtype=torch.int64),
            seq_lens_sum=sum(lens),
            **more,
        )

    def step(self, lengths: dict[int, int], graph: bool = False, **more: Any) -> None:
        """New tokens of some requests: a decode step where each has one, else an extension. Checks the output."""
        requests, counts = list(lengths), list(lengths.values())
        is_decode = all(n == 1 for n in counts)
        slots = [x for request, n in lengths.items() for x in self.place(request, n)]
        q, k, v = self.randn(sum(counts), HEADS), self.randn(sum(counts), KV_HEADS), self.randn(sum(counts), KV_HEADS)
        before = [self.length(x) for x in requests]
        self.remember(lengths, k, v)
        if not is_decode:
            more |= dict(
                extend_seq_lens=torch.tensor(counts),
                extend_prefix_lens=torch.tensor(before),
                extend_seq_lens_cpu=counts,
                extend_prefix_lens_cpu=before,
            )
        mode = ForwardMode.DECODE if is_decode else ForwardMode.EXTEND
        batch = self.batch(mode, requests, [self.length(x) for x in requests], slots, **more)
        if graph:
            self.backend.init_forward_metadata_out_graph(batch)
        else:
            self.backend.init_forward_metadata(batch)
        out = self.backend.forward(q, k.clone(), v.clone(), self.layer, batch, sinks=self.expected.sinks)
        self.check(out, q, lengths)

    def remember(self, lengths: dict[int, int], k: torch.Tensor, v: torch.Tensor) -> None:
        counts = list(lengths.values())
        for request, new_k, new_v in zip(lengths, k.split(counts), v.split(counts)):
            for held, new, index in ((self.keys, new_k, 0), (self.values, new_v, 1)):
                new = self.kept(new, index)
                held[request] = torch.cat([held.get(request, new[:0]), new])

    def check(self, out: torch.Tensor, q: torch.Tensor, lengths: dict[int, int], masks: Any = None) -> None:
        counts = list(lengths.values())
        for i, (request, rows, got) in enumerate(zip(lengths, q.split(counts), out.view(-1, HEADS, DIM).split(counts))):
            want = expect(self.expected, rows, self.keys[request], self.values[request], masks and masks[i])
            assert_close(got, want.out, atol=2e-3 if masks is not None else None)

    def verify(self, trees: dict[int, torch.Tensor], graph: bool = False) -> None:
        """Verification of draft tokens, which stay no part of the requests. ``trees``: bool masks ``[n, n]``."""
        requests, drafts = list(trees), len(next(iter(trees.values())))
        lengths = dict.fromkeys(requests, drafts)
        slots = [x for request in requests for x in self.place(request, drafts)]
        count = drafts * len(requests)
        q, k, v = self.randn(count, HEADS), self.randn(count, KV_HEADS), self.randn(count, KV_HEADS)
        lens = [self.length(x) for x in requests]
        masks = [torch.cat([torch.ones(drafts, m, dtype=torch.bool), tree], 1) for m, tree in zip(lens, trees.values())]
        info = verify_input(drafts, torch.cat([x.flatten() for x in masks]), lens, self.backend.topk)
        batch = self.batch(ForwardMode.TARGET_VERIFY, requests, lens, slots, spec_info=info)
        if graph:
            self.backend.init_forward_metadata_out_graph(batch)
        else:
            self.backend.init_forward_metadata(batch)
        out = self.backend.forward(q, k.clone(), v.clone(), self.layer, batch, sinks=self.expected.sinks)
        held = dict(self.keys), dict(self.values)
        self.remember(lengths, k, v)
        self.check(out, q, lengths, masks if self.backend.topk > 1 else None)
        self.keys, self.values = held


def verify_input(drafts: int, mask: torch.Tensor, lens: list[int], topk: int) -> EagleVerifyInput:
    nothing = torch.zeros(0, dtype=torch.int64)
    return EagleVerifyInput(
        draft_token=nothing,
        custom_mask=mask,
        positions=nothing,
        retrieve_index=nothing,
        retrieve_next_token=nothing,
        retrieve_next_sibling=nothing,
        retrieve_cum_len=nothing,
        spec_steps=3,
        topk=topk,
        draft_token_num=drafts,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        seq_lens_sum=sum(lens),
        seq_lens_cpu=torch.tensor(lens),
    )


def random_tree(drafts: int, seed: int) -> torch.Tensor:
    """Which draft tokens each sees: itself and its ancestors, of which token 0 is the root."""
    draw, seen = random.Random(seed), torch.eye(drafts, dtype=torch.bool)
    for token in range(1, drafts):
        seen[token] |= seen[draw.randrange(token)]
    return seen


def chain(drafts: int) -> torch.Tensor:
    return torch.ones(drafts, drafts, dtype=torch.bool).tril()


def expect(e: Expected, q: Any, k: Any, v: Any, mask: torch.Tensor | None = None) -> oracle.State:
    seen = oracle.visible(
        len(q),
        len(k),
        causal=e.causal,
        window_left=e.window,
        window_right=-1 if e.causal else e.window,
        chunk_size=e.chunk_size,
        custom_mask=mask,
    )
    cap = e.soft_cap or None
    return oracle.attention(q, k, v, mask=seen, sm_scale=e.scale, soft_cap=cap, sinks=e.sinks)
