"""The facts that decide who can compute an attention problem.

A ``Request`` holds them. ``selection`` chooses from nothing else, so the same request always gets the same backend.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from .._core import native
from .._core.problems import FP8_DTYPES, HALF_DTYPES, Mask, PagedKv, Problem, RaggedKv, name_of

FEATURES = {
    "causal": "a causal mask",
    "window": "a sliding window",
    "chunk": "chunked attention",
    "custom_mask": "a mask of one bit per row and key",
    "multi_item": "multi-item scoring",
    "soft_cap": "logits_soft_cap",
    "alibi": "ALiBi",
    "rope": "pos_encoding_mode='ROPE_LLAMA'",
    "sinks": "attention sinks",
    "paged": "a paged KV cache",
    "short_queries": "decode: query rows times query heads per key head are at most 16, on average; fa2 comes first",
    "fp8_few_rows": "fp8 cache, 16-bit queries, rows times heads per key head at most 128: fa2 reads it without a copy",
    "fp8_some_rows": "fp8 cache in pages, 16-bit queries, that product at most 1024: fa3 reads it without a copy",
    "stats": "save_softmax_stats",
    "head_scale": "scales of q or k in tensors, one per head",
    "tensor_scale": "scales of q or k in tensors of one element",
    "unaligned": "an address or a stride that is no multiple of 16 bytes (8 in fp8)",
    "unsized": "multi-item scoring whose mask has no size that the host knows, or no place in a CUDA graph",
    "fp8_copies": "fp8 tensors, or outputs, that lie where only copies of them serve",
    "separate_rope": "the last columns of the keys lie in a tensor of their own",
    "token_lists": "kv_indices_per_token, for tensors or options that no kernel serves it with",
    "quantized_cache": "a quantized latent cache (kv_format), for tensors or options that no kernel serves it with",
    "extra_keys": "a second cache of selected keys (extra_k)",
    "separate_values": "values beside keys of more than 512 columns that are not the first columns of these",
}

# What the compiled module calls the dtypes that kernels have.
DTYPE_NAMES = {dtype: name_of(dtype) for dtype in (*HALF_DTYPES, torch.float32, *FP8_DTYPES)}

# Every backend takes strides between 0 and this many elements, and up to so many rows. Beyond that, each is asked.
ORDINARY = 1 << 30

# Kernels for keys with more columns read values from the same memory.
MOST_SEPARATE_COLUMNS = 512

# fp8 keys and values below 16-bit queries, by rows of a request times the heads that share a key head, on average.
# Some kernels read them as they are: fa2's convert the keys anew for every 64 rows, fa3's (of pages of e4m3) for
# every 128 (head dimension 256: 64), on warps of their own. The others compute from 16-bit copies, which move five
# times the bytes and take twice the memory of the cache. So up to SHORT_ROWS fa2 comes first under "auto", which
# waits for memory; up to FEW_ROWS fa2 may read the cache itself, up to SOME_ROWS fa3 may. Beyond, and where nobody
# knows the number of rows when a batch is planned, copies are made. An explicit backend is what it says, and the rule
# then decides only about copies.
#
# 8 requests over 8k keys, 32/8 heads, hd128, bf16, us on an H100, of 8, 16, 32, 128, 256, 512 rows: fa2 63, 103, 190;
# fa3 67, 69, 83, 271, 528, 1010; from copies (fa3) 354, 534, 890 of 128 and more.
SHORT_ROWS = 32
FEW_ROWS = 128
SOME_ROWS = 1024
SOME_ROWS_OF_256 = 256  # of head dimension 256, whose tiles have 64 rows: 8 x 128 rows 767, from copies about 670
ROW_FEATURES = frozenset({"short_queries", "fp8_few_rows", "fp8_some_rows"})


class Layout(NamedTuple):
    """Rows and strides (name; of a token, of a head, in elements) that are not ordinary, for a backend to judge.

    Numbers of rows that matter to none are given as 2 at most, so that requests of all lengths share one choice.
    """

    rows: int
    keys: int
    strides: tuple[tuple[str, int, int], ...] = ()

    @classmethod
    def of(cls, rows: int, keys: int, **tensors: torch.Tensor) -> Layout:
        """The layout of ``[tokens, heads, dim]`` tensors."""
        strides = tuple((name, x.stride(0), x.stride(1)) for name, x in tensors.items() if not is_ordinary(x))
        rows, keys = (n if n > ORDINARY else min(n, 2) for n in (rows, keys))
        return cls(rows, keys, strides)


class Request(NamedTuple):
    """The facts that decide which backends can serve a problem.

    ``compute_capability`` is ``10 * major + minor``, or None without a CUDA device. ``features`` are elements of
    ``FEATURES``: what the mask, the logits, the output and the tensors ask for beyond plain attention.
    ``layout`` is None where every kernel takes such numbers of rows and strides.
    """

    device_type: str
    compute_capability: int | None
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    o_dtype: torch.dtype
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    features: frozenset[str] = frozenset()
    layout: Layout | None = None

    @classmethod
    def from_problem(cls, problem: Problem, alone: bool = False) -> Request:
        """The facts of a problem; for ``alone`` see ``feature_of_rows``."""
        q, kv, out = problem.q, problem.kv, problem.output.out
        k, v = (kv.k, kv.v) if isinstance(kv, RaggedKv) else (kv.k_cache, kv.v_cache)
        features, layout = _features(problem), None
        if not is_ordinary(q, k, v, out):
            # Of keys with so many columns there are no copies.
            of_keys = 16 if q.size(-1) > MOST_SEPARATE_COLUMNS else None
            if not (is_aligned(q, out) and is_aligned(k, v, to=of_keys)):
                features.add("unaligned")
            elif isinstance(kv, RaggedKv):
                layout = Layout.of(q.size(0), k.size(0), q=q, k=k, v=v, o=out)
            else:  # every kernel takes pages of any strides
                layout = Layout.of(q.size(0), 0, q=q, o=out)
        requests = 1 if problem.qo_indptr is None else problem.qo_indptr.numel() - 1
        dims = (q.size(2), v.size(-1))
        group_size = q.size(1) // k.size(-2)
        if q.size(-1) > MOST_SEPARATE_COLUMNS and v.data_ptr() != k.data_ptr():
            features.add("separate_values")
        of_rows = feature_of_rows(q.dtype, k.dtype, q.size(0), requests, group_size, dims, alone)
        if of_rows and is_aligned(k, v, to=16):
            features.add(of_rows)
        return cls(
            q.device.type,
            compute_capability(q.device),
            q.dtype,
            k.dtype,
            out.dtype,
            q.size(1),
            k.size(-2),
            q.size(-1),
            v.size(-1),
            frozenset(features),
            layout,
        )

    @property
    def types(self) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        return self.q_dtype, self.kv_dtype, self.o_dtype

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.num_qo_heads, self.num_kv_heads, self.head_dim_qk, self.head_dim_vo

    def has(self, *features: str) -> bool:
        """Whether it has one of these features."""
        return not self.features.isdisjoint(features)

    def __str__(self) -> str:
        where = self.device_type
        if self.compute_capability is not None:
            where += f" sm_{self.compute_capability}"
        text = (
            f"{where}, q {name_of(self.q_dtype)}, kv {name_of(self.kv_dtype)}, out {name_of(self.o_dtype)}, "
            f"heads {self.num_qo_heads}/{self.num_kv_heads}, head_dim {self.head_dim_qk}/{self.head_dim_vo}"
        )
        if self.layout is not None:
            text += "".join(f", strides of {name} {token}/{head}" for name, token, head in self.layout.strides)
        return f"{text}, {' '.join(sorted(self.features))}" if self.features else text


def feature_of_rows(
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    rows: int | None,
    requests: int,
    group_size: int,
    head_dims: tuple[int, int],
    alone: bool = False,
) -> str:
    """The one of ``ROW_FEATURES`` that a batch has, or "": see ``SHORT_ROWS`` for fp8 keys and values, is_decode.h for
    others.

    ``rows`` are those of all requests, None where they are unknown. Rows of an fp8 cache with other ``head_dims`` than
    multiples of 16 are rarely aligned as kernels that read it need them. ``alone`` means that results of a request must
    not depend on the others of its batch: then their rows do not count. Of fp8 caches fa2 reads all, since copies would
    cost decoding more than they gain prompts, and fa3 takes all of 16 bits.
    """
    if q_dtype not in HALF_DTYPES:
        return ""
    if kv_dtype == q_dtype:
        is_decode = rows is not None and native.is_decode(rows, requests, group_size, *head_dims, alone)
        return "short_queries" if is_decode else ""
    if kv_dtype not in FP8_DTYPES or (head_dims[0] | head_dims[1]) % 16:
        return ""
    if alone:
        return "short_queries"
    most = SOME_ROWS if max(head_dims) <= 128 else SOME_ROWS_OF_256
    if rows is None or rows * group_size > most * requests:
        return ""
    if rows * group_size > FEW_ROWS * requests:
        return "fp8_some_rows"
    return "fp8_few_rows" if rows * group_size > SHORT_ROWS * requests else "short_queries"


def mask_features(mask: Mask) -> set[str]:
    """The features a mask asks for."""
    has_items, has_bits = mask.multi_item is not None, mask.bits is not None
    asked = {
        "causal": mask.causal and not (has_items or has_bits),
        "window": mask.window_left >= 0,
        "chunk": mask.chunk_size > 0,
        "multi_item": has_items,
        "custom_mask": has_bits and not has_items,
    }
    return {name for name, is_asked in asked.items() if is_asked}


def _features(problem: Problem) -> set[str]:
    mask, logits, output = problem.mask, problem.logits, problem.output
    asked = {
        "unsized": mask.multi_item is not None and mask.bits is None and problem.q.is_cuda,
        "soft_cap": logits.soft_cap > 0.0,
        "alibi": logits.alibi is not None,
        "rope": logits.rope is not None,
        "sinks": logits.sinks is not None,
        "paged": isinstance(problem.kv, PagedKv),
        "stats": output.stats is not None,
        "fp8_copies": copies_fp8(problem),
        "head_scale": logits.head_scale is not None,
    }
    features = mask_features(mask).union(name for name, is_asked in asked.items() if is_asked)
    for scale in (logits.sm_scale, output.scale):
        if isinstance(scale, torch.Tensor):
            features.add("tensor_scale" if scale.numel() == 1 else "head_scale")
    return features


def is_ordinary(*tensors: torch.Tensor) -> bool:
    """Whether every kernel takes tensors that lie in memory like these: aligned, with ordinary strides and rows.

    Part of every call, so it stops at what is enough to know.
    """
    for x in tensors:
        strides = 0
        for stride in x.stride()[:-1]:
            if stride == 0:
                return False
            strides |= stride
        item = x.element_size()
        if strides > ORDINARY or x.size(0) > ORDINARY or (x.data_ptr() | strides * item) % 16:
            return False
    return True


def is_aligned(*tensors: torch.Tensor, to: int | None = None) -> bool:
    """Whether addresses and all strides but the last are multiples of so many bytes: by default of 16, and of 8 in fp8,
    of which kernels can get copies."""
    for x in tensors:
        strides, item = 0, x.element_size()
        for stride in x.stride()[:-1]:
            strides |= stride
        if (x.data_ptr() | strides * item) % (to or (8 if item == 1 else 16)):
            return False
    return True


FP8_PAGE = 8  # pages of a multiple of so many tokens are read as they lie


def copies_fp8(problem: Problem) -> bool:
    """Whether the queries are fp8, and q, k, v or an fp8 output at multiples of 8 bytes only, or keys in pages that no
    fp8 kernel reads. Not latent attention, of which only queries are copied.

    Part of every call.
    """
    q, kv, out = problem.q, problem.kv, problem.output.out
    if q.element_size() > 1 or q.size(-1) > MOST_SEPARATE_COLUMNS:
        return False
    if isinstance(kv, PagedKv) and kv.k_cache.size(1) % FP8_PAGE:
        return True
    keys = (kv.k, kv.v) if isinstance(kv, RaggedKv) else (kv.k_cache, kv.v_cache)
    return not is_aligned(q, *keys, *([out] if out.element_size() == 1 else []), to=16)


def compute_capability(device: torch.device) -> int | None:
    """``10 * major + minor`` of a CUDA device, None for others."""
    if device.type != "cuda":
        return None
    return _cuda_capability(torch.cuda.current_device() if device.index is None else device.index)


@functools.lru_cache(maxsize=64)
def _cuda_capability(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor
