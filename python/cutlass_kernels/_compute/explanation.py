"""Says which backend would compute an attention, and why not the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .._core import checks, hints
from .._core.problems import FP8_DTYPES
from . import kernels
from .request_facts import FEATURES, ROW_FEATURES, Layout, Request, feature_of_rows, is_ordinary
from .request_facts import compute_capability as _capability_of
from .selection import BACKENDS, KERNEL_BACKENDS, preferred, reasons, why_first

# Where the GPU is not here: H100 and H200, A100.
SMS_OF_HOPPER, SMS_OF_AMPERE = 132, 108


@dataclass(frozen=True)
class Candidate:
    """A tile that may compute the requests, and the time that it is estimated to take."""

    name: str
    splits: int
    """KV splits of a tile."""
    has_list: bool
    """Whether a kernel writes a list of tiles first."""
    microseconds: float | None
    """On an H200, or on as many of its SMs as the device has; None of a tile beside which there is no other."""
    taken: bool

    def __str__(self) -> str:
        how = f" in {self.splits} splits" if self.splits > 1 else ""
        how += " by a list" if self.has_list else ""
        time = "" if self.microseconds is None else f": {self.microseconds:.1f} us"
        return f"{self.name}{how}{time}{', taken' if self.taken else ''}"


@dataclass(frozen=True)
class Explanation:
    """What ``backend='auto'`` selects for a request (None if nothing serves it), and the reasons against each."""

    request: Request
    selected: str | None
    reasons: dict[str, list[str]]
    candidates: tuple[Candidate, ...] = ()
    """Tiles that were compared, where the lengths of requests were given."""

    @property
    def is_before_others(self) -> bool:
        """Whether a backend that usually comes first could serve the request, too."""
        usual = [name for name in BACKENDS if not self.reasons[name]]
        return self.selected in BACKENDS and self.selected != usual[0]

    def __str__(self) -> str:
        lines = [str(self.request)]
        for backend in BACKENDS:
            against = self.reasons[backend]
            mark = "selected" if backend == self.selected else "can serve" if not against else "cannot serve"
            first = f", {why_first(self.request)}" if backend == self.selected and self.is_before_others else ""
            lines.append(f"  {backend}: {mark}{first}")
            if backend == self.selected:
                lines += [f"    - {candidate}" for candidate in self.candidates]
            lines += [f"    - {reason}" for reason in against]
        return "\n".join(lines)


def explain(
    q: torch.Tensor | None = None,
    *,
    device: str | torch.device | None = None,
    compute_capability: int | None = None,
    q_dtype: str | torch.dtype | None = None,
    kv_dtype: str | torch.dtype | None = None,
    o_dtype: str | torch.dtype | None = None,
    num_qo_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim_qk: int | None = None,
    head_dim_vo: int | None = None,
    features: Iterable[str] = (),
    batch_size: int | None = None,
    qo_len: int | None = None,
    kv_len: int | None = None,
) -> Explanation:
    """Says which backend would compute an attention, and why not the others; and in which tiles.

    ``torch.compile`` cannot trace this function: call it outside of the compiled function.

    Args:
        q: queries ``[tokens, num_qo_heads, head_dim_qk]`` to take device, dtype, sizes and strides from; keywords
            win over it.
        device: "cpu", "cuda", "cuda:1", ...; a CUDA device if there is one, unless said.
        compute_capability: ``10 * major + minor``, e.g. 90, to ask about a GPU that is not here.
        q_dtype, kv_dtype, o_dtype: dtypes or names; default float16, the dtype of q, the dtype of q (bfloat16 for fp8).
        num_qo_heads, num_kv_heads: default 32, num_qo_heads.
        head_dim_qk, head_dim_vo: default 128, head_dim_qk.
        features: of "causal", "window", "chunk", "custom_mask", "multi_item", "soft_cap", "alibi", "rope", "sinks",
            "paged", "short_queries", "fp8_few_rows", "fp8_some_rows", "stats", "head_scale", "tensor_scale",
            "unaligned", "unsized", "fp8_copies", "separate_rope", "separate_values". Of "short_queries",
            "fp8_few_rows" and "fp8_some_rows" a batch has one at most: decode, or of fp8 keys below 16-bit queries up
            to 32, 128 and 1024 rows times heads per key head.
        batch_size, qo_len, kv_len: requests and the tokens of each: the tiles that may compute them are then compared,
            without a window and in pages of 16 tokens. Few rows imply "short_queries", "fp8_few_rows" or
            "fp8_some_rows". Default: no lengths; with a ``qo_len`` one request, and ``kv_len = qo_len``.

    Returns:
        An object with ``selected``, ``reasons`` (backend to list of sentences), ``candidates`` (tiles and their
        estimated times, if there is a ``qo_len``) and a readable ``str()``, of the kernels of this build. The
        environment's choice is not considered.

    Raises:
        ValueError, TypeError: unknown features or dtypes, sizes that contradict each other, no such device.

    Examples:
        >>> explain(device="cpu").selected
        'reference'
    """
    wanted = frozenset([features] if isinstance(features, str) else features)
    unknown = wanted - FEATURES.keys()
    if unknown:
        raise ValueError(f"features={sorted(unknown)} are not known: use some of {', '.join(sorted(FEATURES))}.")
    layout = None
    if q is not None:
        if not isinstance(q, torch.Tensor) or q.dim() < 2:
            raise TypeError(f"q is {hints.shown(q)}: pass a tensor [tokens, num_qo_heads, head_dim_qk], or keywords.")
        if q.dim() == 3 and not is_ordinary(q):
            layout = Layout.of(q.size(0), 0, q=q)
        device = q.device if device is None else device
        q_dtype = q.dtype if q_dtype is None else q_dtype
        num_qo_heads = q.size(-2) if num_qo_heads is None else num_qo_heads
        head_dim_qk = q.size(-1) if head_dim_qk is None else head_dim_qk
    compute_capability = hints.compute_capability(compute_capability)
    if device is None:
        device = "cuda" if compute_capability is not None or torch.cuda.is_available() else "cpu"
    where = torch.device(device)
    if compute_capability is None:
        hints.cuda_device(where)
        compute_capability = _capability_of(where)
    q_type = checks.dtype("float16" if q_dtype is None else q_dtype)
    kv_type = q_type if kv_dtype is None else checks.dtype(kv_dtype)
    o_default = torch.bfloat16 if q_type in FP8_DTYPES else q_type
    qo_heads = 32 if num_qo_heads is None else checks.integer("num_qo_heads", num_qo_heads)
    kv_heads = qo_heads if num_kv_heads is None else checks.integer("num_kv_heads", num_kv_heads)
    checks.heads(qo_heads, kv_heads)
    dim = 128 if head_dim_qk is None else checks.integer("head_dim_qk", head_dim_qk)
    request = Request(
        where.type,
        compute_capability,
        q_type,
        kv_type,
        o_default if o_dtype is None else checks.dtype(o_dtype),
        qo_heads,
        kv_heads,
        dim,
        dim if head_dim_vo is None else checks.integer("head_dim_vo", head_dim_vo),
        wanted,
        layout,
    )
    lengths = _lengths(batch_size, qo_len, kv_len)
    if lengths is not None:
        requests, rows, _ = lengths
        dims = (request.head_dim_qk, request.head_dim_vo)
        of_rows = feature_of_rows(q_type, kv_type, requests * rows, requests, qo_heads // kv_heads, dims)
        request = request._replace(features=(wanted - ROW_FEATURES) | ({of_rows} - {""}))
    against = {backend: reasons(backend, request) for backend in BACKENDS}
    selected = next((b for b in preferred(request) if not against[b]), None)
    if lengths is None or selected not in KERNEL_BACKENDS:
        return Explanation(request, selected, against)
    return Explanation(request, selected, against, _candidates(selected, request, lengths, where))


def _lengths(batch_size: int | None, qo_len: int | None, kv_len: int | None) -> tuple[int, int, int] | None:
    """Requests, and the rows and keys of each."""
    if qo_len is None:
        if kv_len is None and batch_size is None:
            return None
        raise ValueError("kv_len and batch_size say nothing without qo_len: pass the query tokens of a request, too.")
    given = {"batch_size": 1 if batch_size is None else batch_size, "qo_len": qo_len}
    given["kv_len"] = qo_len if kv_len is None else kv_len
    numbers = [checks.integer(name, value) for name, value in given.items()]
    for name, number in zip(given, numbers, strict=True):
        if not 1 <= number < 1 << 31:
            raise ValueError(f"{name}={number} is not a number of 1 to 2**31 - 1.")
    requests, rows, keys = numbers
    return requests, rows, keys


def _candidates(
    backend: str, request: Request, lengths: tuple[int, int, int], device: torch.device
) -> tuple[Candidate, ...]:
    capability = request.compute_capability
    assert capability is not None
    if torch.cuda.is_available() and _capability_of(device) == capability:
        sms = torch.cuda.get_device_properties(device).multi_processor_count
    else:
        sms = SMS_OF_HOPPER if capability >= 90 else SMS_OF_AMPERE
    found = kernels.candidates(backend, request, *lengths, sms)
    return tuple(Candidate(c["name"], c["splits"], c["list"], c["us"], c["taken"]) for c in found)
