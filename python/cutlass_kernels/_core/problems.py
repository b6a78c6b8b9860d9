"""The one description of an attention problem inside the package.

Every public function turns its arguments into a ``Problem``; every backend computes one. Layouts have
become token-major views (strides say the rest), masks are fields of ``Mask``, and options that change the
logits are fields of ``Logits``. Nothing here checks user input (``checks``) or computes (``reference``,
``kernels``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
HALF_DTYPES = (torch.float16, torch.bfloat16)
FLOAT_DTYPES = (*HALF_DTYPES, torch.float32, torch.float64)


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype without that of its package."""
    return str(dtype).removeprefix("torch.")


@dataclass(slots=True)
class RaggedKv:
    """Keys and values of all requests, packed one after the other.

    ``k`` is ``[nnz_kv, num_kv_heads, head_dim_qk]`` and ``v`` ``[nnz_kv, num_kv_heads, head_dim_vo]``; an HND tensor
    arrives as a transposed view. ``indptr`` is int32 ``[batch + 1]`` in tokens, or None for a single request.
    ``hidden`` (bool ``[nnz_kv, num_kv_heads]``, for the reference alone) marks keys that no row sees: they are finite.
    """

    k: torch.Tensor
    v: torch.Tensor
    indptr: torch.Tensor | None = None
    hidden: torch.Tensor | None = None


@dataclass(slots=True)
class PagedKv:
    """Keys and values in pages.

    ``k_cache`` and ``v_cache`` are ``[pages, page_size, num_kv_heads, head_dim]`` views (an HND cache arrives
    transposed; the two may differ in strides). Request ``b`` owns ``indices[indptr[b]:indptr[b + 1]]`` and fills
    ``last_page_len[b]`` entries of its last page. ``v_indices`` is given where values have a page table of their own.
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor
    v_indices: torch.Tensor | None = None


@dataclass(slots=True)
class MultiItem:
    """Multi-item scoring: a prefix, then items that see the prefix and themselves (contract 0.3)."""

    prefix_len: torch.Tensor
    token_pos: torch.Tensor
    token_pos_len: int
    max_item_len: torch.Tensor


@dataclass(slots=True)
class Mask:
    """Which keys a row sees; everything given is ANDed with ``0 <= key < kv_len``.

    ``bits`` (packed little-endian uint8, one byte-aligned segment per request starting at ``bits_indptr[b]`` bytes) and
    ``multi_item`` replace ``causal``; windows always apply. Without ``causal``, rows see all of their chunk. Where both
    are given, ``bits`` are those of ``multi_item``: kernels need them, in words (``mask_packing.whole_words``) and with
    offsets on the same device.
    """

    causal: bool = False
    window_left: int = -1
    chunk_size: int = 0
    bits: torch.Tensor | None = None
    bits_indptr: torch.Tensor | None = None
    multi_item: MultiItem | None = None
    window_right: int = -1


class Vector(Protocol):
    """What tile lists need of an index tensor: tensors have it, and ``batches.Index``."""

    @property
    def device(self) -> Any: ...
    def numel(self) -> int: ...
    def data_ptr(self) -> int: ...


class Copies(NamedTuple):
    """Copies of int32 vectors to the device: ``(to, from, elements)`` each."""

    from_host: Sequence[tuple[int, int, int]] = ()
    on_device: Sequence[tuple[int, int, int]] = ()


@dataclass(slots=True)
class Pages:
    """The page tables of a batch, on its device; see ``PagedKv``."""

    indices: Vector
    last_page_len: Vector
    page_size: int
    v_indices: Vector | None = None


class Split(NamedTuple):
    """How the keys of short queries may be split.

    ``fixed_size`` (keys per KV split; 0: chosen from the batch) or ``disabled`` make the results of a request
    independent of its batch. ``max_kv_len`` bounds the keys of a request where it is known (0: it is not); ``told`` is
    that bound where it does not come from the lengths of one batch.
    """

    fixed_size: int = 0
    disabled: bool = False
    max_kv_len: int = 0
    told: int = 0

    @property
    def alone(self) -> bool:
        """Whether results of a request must not depend on the others of its batch."""
        return self.fixed_size > 0 or self.disabled


@dataclass(slots=True)
class Offsets:
    """What a tile list is made from. Index tensors are int32 on the device.

    ``kv_indptr`` counts tokens, or entries of ``pages.indices``. ``total_q`` is an upper bound of ``qo_indptr[-1]``,
    None where the host does not know one, ``total_kv`` the number of keys, 0 where it is unknown. ``qo_indptr_host``
    (the address of a host copy) makes the list exact; it is 0 where a captured run has to serve later lists.
    ``mask``, as far as the runs' mask is known, ``total_kv`` and ``general`` decide the size of tiles: where runs are
    captured they must always be the same. ``general`` tells whether runs may have ``mask.bits``, ALiBi slopes, scales
    in tensors, or statistics. ``partials`` is memory for the results of split keys; None lets the tile list bring its
    own.
    """

    qo_indptr: Vector
    kv_indptr: Vector
    total_q: int | None
    total_kv: int = 0
    pages: Pages | None = None
    qo_indptr_host: int = 0
    mask: Mask = field(default_factory=Mask)
    general: bool = False
    split: Split = field(default_factory=Split)
    partials: torch.Tensor | None = None


@dataclass(slots=True)
class Logits:
    """What happens to ``q . k`` before the softmax.

    ``sm_scale`` already contains every per-tensor scale. ``alibi`` holds the slopes (fp32 ``[num_qo_heads]``);
    the bias is ``slope * (key - row)`` with the row index inside the request when ``alibi_relative``, else
    ``slope * key``, and is added before the cap unless ``alibi_after_cap``. ``rope`` is ``(scale, theta)``.
    ``head_scale`` (fp32 ``[num_qo_heads]``) multiplies ``sm_scale`` per head (fp8 descaling).
    ``sinks`` (fp32 ``[num_qo_heads]``) add ``exp(sink)`` to the denominator.
    """

    sm_scale: float | torch.Tensor
    soft_cap: float = 0.0
    alibi: torch.Tensor | None = None
    alibi_relative: bool = True
    alibi_after_cap: bool = False
    rope: tuple[float, float] | None = None
    head_scale: torch.Tensor | None = None
    sinks: torch.Tensor | None = None


@dataclass(slots=True)
class Output:
    """Where results go. ``out`` is ``[nnz_q, num_qo_heads, head_dim_vo]``, any token and head stride, last dimension
    contiguous; ``lse`` fp32 ``[nnz_q, num_qo_heads]`` (base 2) or None; ``stats`` fp32 ``[nnz_q, num_qo_heads, 2]``
    or None, contiguous (row maximum and natural-exponent sum without sinks, see ``trtllm_fmha_v2_prefill``).
    ``scale`` multiplies the output: a number, a one-element tensor, or fp32 ``[num_qo_heads]``. For the reference
    alone: ``max_logits`` (fp32 ``[nnz_q, num_qo_heads]`` or None) gets the largest logit of each row, without its sink,
    and ``sinks_in_lse`` tells whether the LSE includes sinks.
    Rows that belong to no request are not written.
    """

    out: torch.Tensor
    lse: torch.Tensor | None = None
    stats: torch.Tensor | None = None
    scale: float | torch.Tensor = 1.0
    max_logits: torch.Tensor | None = None
    sinks_in_lse: bool = True


@dataclass(slots=True)
class Problem:
    """``q`` is ``[nnz_q, num_qo_heads, head_dim_qk]``; ``qo_indptr`` int32 ``[batch + 1]``, None for a single request.

    Index tensors may live on the CPU or on the device, independently of each other. ``skip_softmax_factor`` is the
    permission of ``trtllm_fmha_v2_prefill`` to skip negligible tiles; 0 computes all.
    """

    q: torch.Tensor
    kv: RaggedKv | PagedKv
    logits: Logits
    output: Output
    mask: Mask = field(default_factory=Mask)
    qo_indptr: torch.Tensor | None = None
    skip_softmax_factor: float = 0.0
