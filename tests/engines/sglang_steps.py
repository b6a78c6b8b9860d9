"""Steps of SGLang on its own classes: layers, pools, batches and speculative inputs; results against the oracle.

Imported only where SGLang is installed.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch
from engine_steps import DIM, HEADS, KV_HEADS, Expected, Requests
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.eagle_info import EagleVerifyInput

from cutlass_kernels.integrations.sglang import backend as ours

CONTEXT = 128


def publish(monkeypatch: Any, *, topk: int = 0, drafts: int = 0, steps: int = 0, dcp: int = 1, invariant: bool = False):
    """What a server's arguments say, as the backend asks for it."""
    spec = dict(speculative_eagle_topk=topk, speculative_num_draft_tokens=drafts, speculative_num_steps=steps)
    exact = SimpleNamespace(enable_deterministic_inference=invariant)
    monkeypatch.setattr(ours, "get_spec", lambda: SimpleNamespace(**spec))
    monkeypatch.setattr(ours, "get_parallel", lambda: SimpleNamespace(attn_dcp_size=dcp, attn_cp_size=1))
    monkeypatch.setattr(ours, "get_exec", lambda: SimpleNamespace(deterministic=exact))


class Steps(Requests):
    """A backend with a layer and a pool, and requests that grow. Token ids of a request are its pages', in order."""

    def __init__(
        self,
        expected: Expected | None = None,
        page_size: int = 1,
        dtype: torch.dtype = torch.float16,
        cache_dtype: torch.dtype | None = None,
        scales: tuple[float, float] | None = None,
        has_window_pool: bool = False,
        make: Any = ours.CutlassKernelsBackend,
    ) -> None:
        super().__init__(expected or Expected(), dtype)
        self.page_size, self.scales, self.cache_dtype = page_size, scales, cache_dtype or dtype
        e, size = self.expected, 1024
        kind = AttentionType.DECODER if e.causal else AttentionType.ENCODER_ONLY
        self.layer = RadixAttention(
            HEADS,
            DIM,
            e.scale,
            KV_HEADS,
            layer_id=0,
            logit_cap=e.soft_cap or 0.0,
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
        if has_window_pool:
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
        self.backend = make(self.runner)
        self.free = list(range(1, size // self.page_size))
        random.Random(0).shuffle(self.free)

    def kept(self, x: torch.Tensor, index: int) -> torch.Tensor:
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
        before = [self.length(x) for x in requests]
        slots, q, k, v = self.grow(lengths)
        if not is_decode:
            more |= dict(
                extend_seq_lens=torch.tensor(counts),
                extend_prefix_lens=torch.tensor(before),
                extend_seq_lens_cpu=counts,
                extend_prefix_lens_cpu=before,
            )
        mode = ForwardMode.DECODE if is_decode else ForwardMode.EXTEND
        batch = self.batch(mode, requests, [self.length(x) for x in requests], slots, **more)
        self.check(self.forward(q, k, v, batch, graph), q, lengths)

    def forward(self, q: Any, k: Any, v: Any, batch: Any, graph: bool = False) -> torch.Tensor:
        """Metadata, as they are made for a graph or without one, and attention."""
        init = self.backend.init_forward_metadata_out_graph if graph else self.backend.init_forward_metadata
        init(batch)
        return self.backend.forward(q, k.clone(), v.clone(), self.layer, batch, sinks=self.expected.sinks)

    def verify(self, trees: dict[int, torch.Tensor], graph: bool = False) -> None:
        """Verification of draft tokens, which stay no part of the requests. ``trees``: bool masks ``[n, n]``."""
        requests, drafts = list(trees), len(next(iter(trees.values())))
        lengths = dict.fromkeys(requests, drafts)
        lens = [self.length(x) for x in requests]
        masks = [torch.cat([torch.ones(drafts, m, dtype=torch.bool), tree], 1) for m, tree in zip(lens, trees.values())]
        held = dict(self.keys), dict(self.values)
        slots, q, k, v = self.grow(lengths)
        info = verify_input(drafts, torch.cat([x.flatten() for x in masks]), lens, self.backend.topk)
        batch = self.batch(ForwardMode.TARGET_VERIFY, requests, lens, slots, spec_info=info)
        out = self.forward(q, k, v, batch, graph)
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
