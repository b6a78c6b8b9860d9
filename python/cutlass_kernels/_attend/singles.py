"""Attention over one request whose keys and values lie in plain tensors."""

from __future__ import annotations

import inspect
from operator import itemgetter
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import is_grad_enabled

from .._compute import request_facts, selection
from .._core import call_table, checks, extra_arguments, native, run_options, signatures
from .._core.autograd import forward_only, needs_grad, written
from .._core.fronts import front
from .._core.problems import Logits, Mask, Output, Problem, RaggedKv
from .._core.run_options import Result
from .._core.signatures import typed_as
from .._core.tracing import have_own_dispatch, is_traced
from .._graphs import operators
from .._masks import mask_packing


class Single(NamedTuple):
    """The arguments of prefill and decode. Those up to ``backend`` stand in the order of the compiled module."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    return_lse: bool = False
    causal: bool = False
    kv_layout: str = "NHD"
    window_left: int = -1
    logits_soft_cap: float | None = None
    sm_scale: float | None = None
    q_scale: float | None = None
    k_scale: float | None = None
    v_scale: float | None = None
    backend: str = "auto"
    scale_q: checks.Scale | None = None
    scale_k: checks.Scale | None = None
    scale_v: checks.Scale | None = None
    custom_mask: torch.Tensor | None = None
    packed_custom_mask: torch.Tensor | None = None
    o_dtype: str | torch.dtype | None = None
    kv_cache_sf: Any = None
    pos_encoding_mode: str = "NONE"
    rope_scale: float | None = None
    rope_theta: float | None = None


_TUPLES = {"direct": " ".join(Single._fields[:16]), "others": " ".join(Single._fields[16:])}

_PLAIN = (*[None] * 7, "NONE")  # of a direct call, ``others`` without the last two, which only ROPE_LLAMA reads
_GRADIENTS = ["q", "k", "v", "out", "lse", "sinks", "q_scale", "k_scale", "v_scale"]
_with_gradients = itemgetter(*map(Single._fields.index, _GRADIENTS))


class _Unused:
    """Permissions that change nothing."""

    allow_fp16_qk_reduction: bool = False
    use_fp16_qk_reduction: bool = False
    use_tensor_cores: bool = False


def _attend(direct: tuple[Any, ...], others: tuple[Any, ...], is_decode: bool) -> Result:
    """A ``Single`` in two tuples. A decode has one row of queries, without its dimension."""
    traced = is_traced()
    if (
        not traced
        and others[:8] == _PLAIN
        and not selection.is_logged()
        and not (is_grad_enabled() and needs_grad(*_with_gradients(direct)))
    ):
        compiled, backend = native.single_decode if is_decode else native.single_prefill, direct[-1]
        asked = selection.asked_for(backend)
        result: Result | None = compiled(*(direct if asked is backend else (*direct[:-1], asked)))
        if result is not None:
            if direct[3] is not None or direct[4] is not None:
                written(*direct[3:5])
            return result
    grad = not traced and is_grad_enabled() and needs_grad(*_with_gradients(direct), *others[:3])
    if others[6] is not None:  # kv_cache_sf
        raise NotImplementedError("kv_cache_sf is set, but 4-bit caches are not supported: use fp8 keys and values.")
    given = Single(*direct, *others)
    given = given._replace(return_lse=checks.flag("return_lse", given.return_lse))
    if is_decode:
        given = _with_rows(given)
    is_for_graphs = traced or have_own_dispatch(given.q, given.k, given.v)
    result = _traced(given) if is_for_graphs else _compute(given)
    if is_decode:
        result = (result[0].squeeze(0), result[1].squeeze(0)) if given.return_lse else result.squeeze(0)
    if grad and not is_for_graphs:
        return forward_only(result, direct[3:5], *direct[:3], direct[5], *direct[12:15], *others[:3])
    return result


@typed_as(signatures.single_prefill_with_kv_cache)
@front(
    [Single, _Unused],
    "q k v custom_mask packed_custom_mask causal kv_layout pos_encoding_mode allow_fp16_qk_reduction sm_scale "
    "window_left logits_soft_cap rope_scale rope_theta * return_lse scale_q scale_k scale_v o_dtype "
    "use_fp16_qk_reduction backend kv_cache_sf k_scale v_scale sinks out lse",
    tuples=_TUPLES,
    into=Single,
    run=_attend,
    constants={"is_decode": False},
    by_position=extra_arguments.single_prefill_positions,
)
def single_prefill_with_kv_cache() -> Result:
    r"""Prefill (append) attention of one request: ``softmax(cap(sm_scale * q k^T)) v`` over the visible keys.

    Row i stands at key position ``p = i + kv_len - qo_len``: the last row at the last key. It sees key j if all of
    these hold: the mask bit (i, j) is set, where a custom mask is given; else ``j <= p``, where ``causal``; and
    ``j >= p - window_left``, where ``window_left >= 0``. A row that sees no key has output 0 and LSE -inf. Key and
    value positions that no row sees may hold anything, NaN included.

    FlashInfer's newer positional order is accepted, too: ``scale_q, scale_k, scale_v, o_dtype`` stand behind v, in
    front of ``custom_mask``, and ``backend, return_lse, kv_cache_sf, k_scale, v_scale`` behind ``rope_theta``. A
    floating tensor in the place of a scale, or an ``o_dtype`` or mask behind them, tells the two orders apart.

    Args:
        q: ``[qo_len, num_qo_heads, head_dim_qk]``; float16, bfloat16, or fp8 with k and v of the same type. Strides are
            free, but the last dimension is contiguous (so slices of a packed projection are fine, for k and v too).
        k: ``[kv_len, num_kv_heads, head_dim_qk]``, or ``[num_kv_heads, kv_len, head_dim_qk]`` where ``kv_layout`` is
            "HND". The dtype of q, or fp8. ``num_kv_heads`` divides ``num_qo_heads``; query head h reads key head
            ``h // (num_qo_heads // num_kv_heads)``.
        v: as k, with ``head_dim_vo`` in the last dimension.
        custom_mask: bool ``[qo_len, kv_len]`` or that flattened, True where row i sees key j.
        packed_custom_mask: the same as bits, ``packbits(mask.flatten(), bitorder="little")``; it wins over
            ``custom_mask``.
        causal: whether rows see no key behind their own position; ignored where a mask is given.
        kv_layout: "NHD" or "HND".
        pos_encoding_mode: "NONE"; "ROPE_LLAMA" (rotary embedding of q at p and k at j, halves paired: Su et al.,
            "RoFormer", 2021); or "ALIBI" (adds ``slope_h * (j - i)``: Press et al., "Train Short, Test Long", 2022).
        allow_fp16_qk_reduction, use_fp16_qk_reduction: permission to accumulate ``q k^T`` in half precision. Accepted;
            the accumulation is always fp32.
        sm_scale: default ``1 / sqrt(head_dim_qk)``.
        window_left: keys seen to the left of a row's position, itself not counted; negative for all.
        logits_soft_cap: c > 0 replaces a logit s by ``c tanh(s / c)``; None or <= 0 is off.
        rope_scale, rope_theta: position divisor (default 1) and base (default 1e4) of "ROPE_LLAMA".
        return_lse: whether to return the LSE too.
        scale_q, scale_k, scale_v: dequantization factors of fp8 inputs: numbers, or fp32 tensors with one element per
            head (``[num_qo_heads]``, ``[num_kv_heads]``, ``[num_kv_heads]``).
        o_dtype: dtype of the output; default that of q. Required for fp8 q.
        backend: "auto", "fa3", "fa2" or "reference". "auto" takes the fastest that serves all arguments. Calls may come
            from any threads and streams, and be captured into CUDA graphs.
        kv_cache_sf: scale factors of 4-bit caches; not supported.
        k_scale, v_scale: per-tensor factors of k (into the logits) and v (into the output).
        sinks: fp32 ``[num_qo_heads]``; adds ``exp(sink)`` to the softmax denominator (and to the LSE).
        out, lse: tensors to write to instead of new ones.

    Returns:
        The output ``[qo_len, num_qo_heads, head_dim_vo]``, or with ``return_lse`` the pair of it and the LSE, fp32
        ``[qo_len, num_qo_heads]``: the base-2 logarithm of the softmax denominator (times ln 2 for the natural one).

    Raises:
        TypeError: an argument is given twice, or too many are given by position.
        KeyError: unknown ``kv_layout`` or ``pos_encoding_mode``.
        ValueError: shapes, dtypes or devices that do not fit together, a mask shorter than ``qo_len * kv_len``, an
            unknown backend, or an explicit backend that cannot serve the call.
        RuntimeError: ``num_kv_heads`` does not divide ``num_qo_heads``.
        NotImplementedError: ``kv_cache_sf`` is set.

    Examples:
        >>> q = torch.randn(128, 32, 128, dtype=torch.float16)
        >>> k, v = torch.randn(2, 4096, 4, 128, dtype=torch.float16)
        >>> single_prefill_with_kv_cache(q, k, v, causal=True).shape
        torch.Size([128, 32, 128])
    """
    raise NotImplementedError


@typed_as(signatures.single_prefill_with_kv_cache_return_lse)
def single_prefill_with_kv_cache_return_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, return_lse: bool = True, **more: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """``single_prefill_with_kv_cache`` with ``return_lse=True``: returns ``(out, lse)``, the LSE in base 2.

    ``more`` are the keyword-only arguments of that function. It accepts both positional orders, too.

    Examples:
        >>> q, k, v = torch.randn(3, 16, 8, 64, dtype=torch.float16)
        >>> out, lse = single_prefill_with_kv_cache_return_lse(q, k, v)
        >>> lse.shape
        torch.Size([16, 8])
    """
    result: Any = single_prefill_with_kv_cache(q, k, v, *args, return_lse=return_lse, **more)
    return result


_shown = inspect.signature(single_prefill_with_kv_cache)
_parameters = [x for x in _shown.parameters.values() if x.kind is not x.KEYWORD_ONLY]
_parameters.append(_shown.parameters["return_lse"].replace(default=True))
_parameters.append(inspect.Parameter("more", inspect.Parameter.VAR_KEYWORD, annotation="Any"))
single_prefill_with_kv_cache_return_lse.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    _parameters, return_annotation="tuple[torch.Tensor, torch.Tensor]"
)


@typed_as(signatures.single_decode_with_kv_cache)
@front(
    [Single, _Unused],
    "q k v kv_layout pos_encoding_mode use_tensor_cores q_scale k_scale v_scale window_left logits_soft_cap sm_scale "
    "rope_scale rope_theta return_lse * scale_q scale_k scale_v o_dtype backend kv_cache_sf sinks out lse",
    tuples=_TUPLES,
    into=Single,
    run=_attend,
    constants={"is_decode": True},
)
def single_decode_with_kv_cache() -> Result:
    """Decode attention of one request: the token of q stands at the last key and sees all keys, or its window of them.

    Args:
        q: ``[num_qo_heads, head_dim_qk]``; float16, bfloat16, or fp8 with k and v of the same type.
        k: ``[kv_len, num_kv_heads, head_dim_qk]``, or ``[num_kv_heads, kv_len, head_dim_qk]`` where ``kv_layout`` is
            "HND". The dtype of q, or fp8. ``num_kv_heads`` divides ``num_qo_heads``, in any ratio.
        v: as k, with ``head_dim_vo`` in the last dimension.
        kv_layout: "NHD" or "HND".
        pos_encoding_mode: "NONE", "ROPE_LLAMA" (q at position ``kv_len - 1``, key j at j) or "ALIBI" (adds
            ``slope_h * j`` to the logits).
        use_tensor_cores: accepted; which instructions are used is the backend's choice.
        q_scale, k_scale: per-tensor factors of q and k, which multiply ``sm_scale``.
        v_scale: per-tensor factor of v, which multiplies the output.
        window_left: keys seen besides the last one; negative for all.
        logits_soft_cap: c > 0 replaces a logit s by ``c tanh(s / c)``; None or <= 0 is off.
        sm_scale: default ``1 / sqrt(head_dim_qk)``.
        rope_scale, rope_theta: position divisor (default 1) and base (default 1e4) of "ROPE_LLAMA".
        return_lse: whether to return the LSE too.
        scale_q, scale_k, scale_v, o_dtype, backend, kv_cache_sf, sinks: as in
            ``single_prefill_with_kv_cache``.
        out, lse: tensors to write to instead of new ones.

    Returns:
        The output ``[num_qo_heads, head_dim_vo]``, or with ``return_lse`` the pair of it and the LSE, fp32
        ``[num_qo_heads]``: the base-2 logarithm of the softmax denominator. Without keys they are 0 and -inf.

    Raises:
        KeyError, ValueError, RuntimeError, NotImplementedError: as in
            ``single_prefill_with_kv_cache``.

    Examples:
        >>> q = torch.randn(32, 128, dtype=torch.float16)
        >>> k, v = torch.randn(2, 4096, 8, 128, dtype=torch.float16)
        >>> single_decode_with_kv_cache(q, k, v).shape
        torch.Size([32, 128])
    """
    raise NotImplementedError


# --- calls that no kernel serves directly --------------------------------------------------------------------------


def _with_rows(call: Single) -> Single:
    out, lse = call.out, call.lse
    return call._replace(
        q=checks.tensor("q", call.q, 2).unsqueeze(0),
        out=None if out is None else checks.tensor("out", out, 2).unsqueeze(0),
        lse=None if lse is None else checks.tensor("lse", lse, 1).unsqueeze(0),
    )


def _compute(call: Single) -> Result:
    """Checks everything, then computes."""
    q = checks.tensor("q", call.q, 3)
    k, v = _keys_and_values(q, call.k, call.v, call.kv_layout)
    (rows, num_qo_heads, head_dim), num_kv_heads, device = q.shape, k.size(1), q.device
    mask = Mask(causal=checks.flag("causal", call.causal), window_left=checks.window(call.window_left))
    if call.packed_custom_mask is not None or call.custom_mask is not None:
        _set_bits(mask, call.custom_mask, call.packed_custom_mask, q, k.size(0))
    o_dtype = call.out.dtype if call.o_dtype is None and isinstance(call.out, torch.Tensor) else call.o_dtype
    o_dtype = checks.element_types(q.dtype, k.dtype, v.dtype, o_dtype)
    rope = checks.rope(call.pos_encoding_mode, call.rope_scale, call.rope_theta)
    logits = Logits(checks.sm_scale(call.sm_scale, head_dim), checks.soft_cap(call.logits_soft_cap), rope=rope)
    checks.rope_dim(call.pos_encoding_mode, head_dim)
    if call.pos_encoding_mode == "ALIBI":
        logits.alibi = checks.alibi_slopes(num_qo_heads, device)
    if call.sinks is not None:
        logits.sinks = checks.sinks(call.sinks, num_qo_heads, device)
    out_scale = checks.scale(call.v_scale, "v_scale")
    if call.q_scale is not None or call.k_scale is not None:
        factors = checks.scale(call.q_scale, "q_scale"), checks.scale(call.k_scale, "k_scale")
        logits.sm_scale = checks.product(logits.sm_scale, *factors)
    scales = call.scale_q, call.scale_k, call.scale_v
    if scales != (None, None, None):
        factor, logits.head_scale, values = checks.descale(*scales, num_qo_heads, num_kv_heads, device)
        logits.sm_scale = checks.product(logits.sm_scale, factor)
        out_scale = checks.product(out_scale, values)
    out = checks.output(call.out, (rows, num_qo_heads, v.size(2)), o_dtype, device)
    lse = call.lse
    if call.return_lse or lse is not None:
        lse = checks.lse_output(lse, (rows, num_qo_heads), device)
    problem = Problem(q, RaggedKv(k, v), logits, Output(out, lse, None, out_scale), mask)
    selection.compute(problem, selection.select(call.backend, request_facts.Request.from_problem(problem)))
    return (out, lse) if call.return_lse else out


def _keys_and_values(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """``k`` and ``v`` as ``[tokens, heads, dim]`` views that fit q ``[rows, heads, dim]``."""
    k = checks.token_major(checks.tensor("k", k, 3), kv_layout)
    v = checks.token_major(checks.tensor("v", v, 3), kv_layout)
    kv_len, num_kv_heads, head_dim = k.shape
    if v.size(0) != kv_len or v.size(1) != num_kv_heads:
        raise ValueError(
            f"k has {kv_len} tokens and {num_kv_heads} heads, but v has {v.size(0)} and {v.size(1)} "
            f"(kv_layout={kv_layout!r}): they must be equal."
        )
    if head_dim != q.size(2):
        raise ValueError(f"q has head_dim {q.size(2)} and k {head_dim}: they must be equal.")
    checks.heads_of(q, k, kv_layout)
    if k.device != q.device or v.device != q.device:
        checks.same_device(q.device, k=k, v=v)
    return k, v


def _set_bits(
    mask: Mask, custom: torch.Tensor | None, packed: torch.Tensor | None, q: torch.Tensor, kv_len: int
) -> None:
    qo_lens, kv_lens = [q.size(0)], [kv_len]
    if packed is not None:
        mask.bits_indptr = mask_packing.check_packed_mask(packed, qo_lens, kv_lens)
        mask.bits = packed
    else:
        assert custom is not None
        mask.bits, mask.bits_indptr = mask_packing.pack_mask(custom, qo_lens, kv_lens)
    assert mask.bits is not None
    checks.same_device(q.device, custom_mask=mask.bits)
    mask.bits = mask_packing.whole_words(mask.bits)


# --- in graphs ---------------------------------------------------------------------------------------------------


def _traced(call: Single) -> Result:
    options = run_options.options(
        call.causal,
        call.pos_encoding_mode,
        call.window_left,
        call.logits_soft_cap,
        call.sm_scale,
        call.rope_scale,
        call.rope_theta,
        False,
    )
    q_scale, k_scale = call.q_scale, call.k_scale
    if q_scale is not None:
        k_scale = q_scale if k_scale is None else q_scale * k_scale
    checked = {name: getattr(options, name) for name in options._fields if name in Single._fields}
    return _in_graph(**call._replace(**checked, k_scale=k_scale)._asdict())


_SCALES = dict.fromkeys(("k_scale", "v_scale", "scale_q", "scale_k", "scale_v"), call_table.Scale)
_in_graph = operators.operator(
    "single",
    {**get_type_hints(Single), **_SCALES, "o_dtype": torch.dtype | None},
    single_prefill_with_kv_cache,
    lambda x: operators.outputs(x, x.q, x.v.shape[-1]),
    left_out=("q_scale", "kv_cache_sf"),
)
