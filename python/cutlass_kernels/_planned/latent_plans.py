"""What a plan of ``BatchMLAPagedAttentionWrapper`` keeps: lengths and page tables, and what its runs have to pass."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from .._core import checks, extra_arguments, index_vectors
from .._core.problems import FLOAT_DTYPES, FP8_DTYPES

_CSR = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
_DENSE = ("cum_seq_lens_q", "block_tables", "seq_lens")
_FIELDS = (*_CSR, *_DENSE, "max_q_len")
_LAYOUTS = (None, "packed", "split")
_LSE_MODES = ("none", "base2", "basee")
_SCALE_MODES = ("default", "kv-per-tensor", "bmm-scalar", "bmm-tensor")


@dataclass(frozen=True)
class MLAPlanMetadata:
    """Lengths and page tables for ``BatchMLAPagedAttentionWrapper.plan(metadata=)``, as indptrs or as block tables.

    Args:
        qo_indptr, kv_indptr, kv_indices, kv_len_arr: as ``plan()`` takes them.
        cum_seq_lens_q: int32 ``[batch + 1]``, first query row of each request.
        block_tables: int32 ``[batch, M]``, the pages of each request. Entries behind its last page are not read.
        seq_lens: int32 ``[batch]``, keys of each request.
        max_q_len: bound of the query lengths, with either form.

    Examples:
        >>> tables, lens = torch.tensor([[4, 0], [7, 0]], dtype=torch.int32), torch.tensor([20, 5], dtype=torch.int32)
        >>> MLAPlanMetadata.dense(torch.arange(3, dtype=torch.int32), tables, lens).max_q_len is None
        True
    """

    qo_indptr: torch.Tensor | None = None
    kv_indptr: torch.Tensor | None = None
    kv_indices: torch.Tensor | None = None
    kv_len_arr: torch.Tensor | None = None
    cum_seq_lens_q: torch.Tensor | None = None
    block_tables: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None
    max_q_len: int | None = None

    @classmethod
    def csr(
        cls, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_len_arr: torch.Tensor
    ) -> MLAPlanMetadata:
        """Indptrs and page numbers."""
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)

    @classmethod
    def dense(
        cls,
        cum_seq_lens_q: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        max_q_len: int | None = None,
    ) -> MLAPlanMetadata:
        """Block tables."""
        return cls(None, None, None, None, cum_seq_lens_q, block_tables, seq_lens, max_q_len)

    @classmethod
    def dual(
        cls,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        *,
        cum_seq_lens_q: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        max_q_len: int | None = None,
    ) -> MLAPlanMetadata:
        """Both. Runs use the indptrs; on the CPU, both must say the same lengths."""
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr, cum_seq_lens_q, block_tables, seq_lens, max_q_len)


class Lengths:
    """Checked index vectors of a plan, each on its own device, and what the host knows of them.

    ``kv_indices`` is None where those of the last plan stay. ``total_rows`` is the end of ``qo_indptr``, ``most_rows``
    the longest query, ``most_keys`` the most keys of a request: None where unknown. ``page_bound`` is the number of
    pages that the cache must have, 0 where unknown.
    """

    def __init__(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_len_arr: torch.Tensor,
        kv_indices: torch.Tensor | None,
        page_bound: int = 0,
        most_rows: int | None = None,
        most_keys: int | None = None,
    ) -> None:
        self.qo_indptr, self.kv_indptr = qo_indptr, kv_indptr
        self.kv_len_arr, self.kv_indices = kv_len_arr, kv_indices
        self.page_bound = page_bound
        self.total_rows: int | None = None
        self.most_rows, self.most_keys = most_rows, most_keys
        if qo_indptr.device.type == "cpu":
            self.total_rows = int(qo_indptr[-1])
            longest = _longest(qo_indptr.diff())
            if most_rows is not None and most_rows < longest:
                raise ValueError(f"max_q_len={most_rows}, but a request has {longest} rows: pass their maximum.")
            self.most_rows = longest if most_rows is None else max(most_rows, 1)
        if kv_len_arr.device.type == "cpu":
            self.most_keys = _longest(kv_len_arr)

    @property
    def batch(self) -> int:
        return self.qo_indptr.numel() - 1


def lengths(metadata: Any, flat: MLAPlanMetadata, page_size: int) -> Lengths:
    """The lengths of a plan, from ``metadata`` or from arguments of ``plan()``."""
    given = flat
    if metadata is not None:
        missing = [name for name in _FIELDS if not hasattr(metadata, name)]
        if missing:
            raise TypeError(f"metadata is {type(metadata).__name__}: pass an MLAPlanMetadata.")
        for name in (name for name in _FIELDS if getattr(flat, name) is not None):
            raise ValueError(f"metadata and {name} are given: pass one of them.")
        given = metadata
    csr, dense = (_names_of(given, names) for names in (_CSR, _DENSE))
    if csr and dense and metadata is None:
        raise ValueError(f"{csr[0]} and {dense[0]} are given: pass indptrs or block tables, not both.")
    if not csr and not dense:
        raise TypeError("plan() needs qo_indptr, kv_indptr, kv_indices and kv_len_arr, or metadata.")
    bound = None if given.max_q_len is None else checks.integer("max_q_len", given.max_q_len)
    if not csr:
        return _of_tables(_all_of(given, _DENSE), page_size, bound)
    found = _of_indptrs(_all_of(given, _CSR), page_size, bound)
    if dense:
        _check_same(found, _of_tables(_all_of(given, _DENSE), page_size, bound))
    return found


def _names_of(given: Any, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if getattr(given, name) is not None]


def _all_of(given: Any, names: tuple[str, ...]) -> list[Any]:
    missing = [name for name in names if getattr(given, name) is None]
    if missing:
        raise TypeError(f"{', '.join(missing)}: missing. Indptrs or block tables come with {', '.join(names)}.")
    return [getattr(given, name) for name in names]


def _of_indptrs(given: list[Any], page_size: int, max_q_len: int | None) -> Lengths:
    qo_indptr, kv_indptr, kv_indices, kv_len_arr = given
    qo_indptr = index_vectors.indptr("qo_indptr", qo_indptr, from_zero=True)
    batch = qo_indptr.numel() - 1
    kv_indptr = index_vectors.indptr("kv_indptr", kv_indptr, batch)
    kv_indices = index_vectors.index_vector("kv_indices", kv_indices)
    kv_len_arr = index_vectors.index_vector("kv_len_arr", kv_len_arr, batch)
    bound = 0
    if kv_indptr.device.type == "cpu":
        first, end = int(kv_indptr[0]), int(kv_indptr[-1])
        index_vectors.enough_entries(kv_indptr, kv_indices)
        if kv_len_arr.device.type == "cpu":
            index_vectors.enough_room("kv_len_arr", kv_len_arr, kv_indptr.diff(), page_size)
        bound = index_vectors.page_bound("kv_indices", kv_indices[first:end])
    return Lengths(qo_indptr, kv_indptr, kv_len_arr, kv_indices, bound, max_q_len)


def _of_tables(given: list[Any], page_size: int, max_q_len: int | None) -> Lengths:
    """Lengths whose request b has the pages ``[b * M, (b + 1) * M)`` of the flattened table, of which its keys fill
    the first."""
    cum_seq_lens_q, block_tables, seq_lens = given
    qo_indptr = index_vectors.indptr("cum_seq_lens_q", cum_seq_lens_q, from_zero=True)
    batch = qo_indptr.numel() - 1
    if not isinstance(block_tables, torch.Tensor) or block_tables.dim() != 2 or block_tables.size(0) != batch:
        shape = tuple(block_tables.shape) if isinstance(block_tables, torch.Tensor) else type(block_tables).__name__
        raise ValueError(f"block_tables is {shape}: it must be an int32 tensor [{batch}, pages of a request].")
    lens = index_vectors.index_vector("seq_lens", seq_lens, batch)
    indices = index_vectors.index_vector("block_tables", block_tables.flatten())
    most = block_tables.size(1)
    on_cpu = lens.device.type == "cpu"
    bound = 0
    if on_cpu:
        index_vectors.enough_room("seq_lens", lens, torch.full((batch,), most), page_size)
        if indices.device.type == "cpu":
            read = torch.arange(most) * page_size < lens[:, None]
            bound = index_vectors.page_bound("block_tables", indices.view(batch, most)[read])
    indptr = torch.arange(batch + 1, dtype=torch.int32, device="cpu" if on_cpu else lens.device) * most
    return Lengths(qo_indptr, indptr, lens, indices, bound, max_q_len, most * page_size)


def _check_same(csr: Lengths, dense: Lengths) -> None:
    """ValueError where two forms of metadata, on the CPU, say other lengths."""
    pairs = (
        ("qo_indptr", csr.qo_indptr, "cum_seq_lens_q", dense.qo_indptr),
        ("kv_len_arr", csr.kv_len_arr, "seq_lens", dense.kv_len_arr),
    )
    for name, x, other, y in pairs:
        if x.device.type == y.device.type == "cpu" and not torch.equal(x, y):
            raise ValueError(f"{name} and {other} of the metadata differ: both must say the same lengths.")


def _longest(lens: torch.Tensor) -> int:
    return max(int(lens.max()), 1) if lens.numel() else 1


# --- what runs have to pass --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contract:
    """Dtypes of a plan and what its runs have to pass. ``output_dtype`` is None where runs decide."""

    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    output_dtype: torch.dtype | None
    lse_mode: str
    scale_mode: str
    use_sinks: bool

    def check_run(
        self, out: Any, wants_lse: bool, base_e: bool, kv: tuple[Any, Any], bmm: tuple[Any, Any], sinks: bool
    ) -> None:
        """ValueError where a run passes other things than ``plan()`` was told. ``kv``, ``bmm``: scales."""
        if self.output_dtype is not None and isinstance(out, torch.Tensor) and out.dtype != self.output_dtype:
            raise ValueError(f"out has dtype {out.dtype}, but output_dtype={self.output_dtype} is planned.")
        if wants_lse and self.lse_mode != "none" and base_e != (self.lse_mode == "basee"):
            raise ValueError(
                f"return_lse_base_on_e={base_e}, but lse_mode={self.lse_mode!r} is planned: pass "
                f"return_lse_base_on_e={not base_e}, or plan again."
            )
        if any(x is not None for x in kv) and any(x is not None for x in bmm):
            raise ValueError("ckv_scale or kpe_scale and bmm1_scale or bmm2_scale are given: pass one kind.")
        if self.scale_mode.startswith("bmm") and any(x is None for x in bmm):
            raise ValueError(f"scale_mode={self.scale_mode!r} is planned: pass bmm1_scale and bmm2_scale to run().")
        if self.scale_mode == "kv-per-tensor" and any(x is None for x in kv):
            raise ValueError("scale_mode='kv-per-tensor' is planned: pass ckv_scale and kpe_scale to run().")
        if self.use_sinks and not sinks:
            raise ValueError("use_sinks=True is planned: pass sinks to run().")

    def scaled(
        self, ckv_scale: Any, kpe_scale: Any, q_nope: torch.Tensor, q_pe: torch.Tensor
    ) -> tuple[float | None, float | None, torch.Tensor, torch.Tensor]:
        """The factors of keys and of values, and queries that make the first one common to both parts of a key."""
        if ckv_scale is None and kpe_scale is None:
            return None, None, q_nope, q_pe
        if self.kv_dtype not in FP8_DTYPES:
            raise ValueError(f"ckv_scale and kpe_scale are for fp8 caches, but {self.kv_dtype} is planned.")
        factors = []
        for name, value in (("ckv_scale", ckv_scale), ("kpe_scale", kpe_scale)):
            checks.one_factor(name, value)
            checks.no_gradient(name, value)
            factors.append(1.0 if value is None else float(value))
            if not (math.isfinite(factors[-1]) and factors[-1] > 0):
                raise ValueError(f"{name}={value} must be finite and positive.")
        ckv, kpe = factors
        if ckv == kpe or q_pe.size(-1) == 0:
            return ckv, ckv, q_nope, q_pe
        if q_pe.dtype in FP8_DTYPES:
            raise ValueError(
                f"ckv_scale={ckv_scale} and kpe_scale={kpe_scale} differ, which fp8 queries do not allow for: use "
                "one scale, or 16-bit queries."
            )
        # The smaller factor goes to the queries: a quotient above 1 could make them overflow.
        return (ckv, ckv, q_nope, q_pe * (kpe / ckv)) if kpe < ckv else (kpe, ckv, q_nope * (ckv / kpe), q_pe)


def why_not_captured(dims: tuple[int, int], kv_dtype: torch.dtype) -> str | None:
    """Why no kernel serves caches of so many columns (ckv, kpe), so that CUDA graphs cannot hold the runs."""
    ckv, kpe = dims
    if kpe and dims != (512, 64):
        return f"head_dim_ckv={ckv} and head_dim_kpe={kpe} have no kernel: 512 and 64 have."
    if kpe:
        return f"kv_data_type={kv_dtype} has no kernel: use e4m3 or 16 bits." if kv_dtype == torch.float8_e5m2 else None
    if ckv > 512 or ckv % 8:
        return f"head_dim_ckv={ckv} without kpe has no kernel: use a multiple of 8 up to 512."
    if kv_dtype in FP8_DTYPES and ckv > 256:
        return f"kv_data_type={kv_dtype} of head_dim_ckv={ckv} without kpe has no kernel: use a cache of 16 bits."
    return None


def contract(
    name: str,
    q_data_type: Any,
    kv_data_type: Any,
    output_dtype: Any,
    layouts: dict[str, Any],
    lse_mode: Any,
    output_scale: Any,
    scale_mode: Any,
    skip_softmax: Any,
    use_sinks: Any,
) -> Contract:
    """What runs of a plan have to pass, from arguments of ``plan()``."""
    for argument, value in layouts.items():
        _one_of(argument, value, _LAYOUTS)
    _one_of("lse_mode", lse_mode, _LSE_MODES)
    _one_of("scale_mode", scale_mode, _SCALE_MODES)
    _one_of("output_scale", output_scale, ("none", "per-tensor"))
    remedy = "outputs have no scale of their own. Pass bmm2_scale to run()."
    extra_arguments.unsupported(name, remedy, output_scale=None if output_scale == "none" else output_scale)
    extra_arguments.unsupported(name, "all keys are computed. Leave it out.", skip_softmax=skip_softmax)
    q_dtype, kv_dtype = checks.dtype(q_data_type), checks.dtype(kv_data_type)
    if q_dtype not in FLOAT_DTYPES and q_dtype not in FP8_DTYPES:
        raise ValueError(f"q_data_type={q_dtype} is not served: use float16, bfloat16 or float8_e4m3fn.")
    if kv_dtype != q_dtype and (q_dtype in FP8_DTYPES or kv_dtype not in FP8_DTYPES):
        raise ValueError(
            f"kv_data_type={kv_dtype} and q_data_type={q_dtype}: the cache must have the dtype of the queries, or fp8 "
            "with 16-bit queries."
        )
    wanted = None
    if output_dtype is not None:
        wanted = checks.element_types(q_dtype, kv_dtype, kv_dtype, output_dtype, "output_dtype")
    return Contract(q_dtype, kv_dtype, wanted, lse_mode, scale_mode, checks.flag("use_sinks", use_sinks))


def _one_of(name: str, value: Any, known: tuple[Any, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r} is unknown: use one of {', '.join(map(repr, known))}.")


def parts(name: str, value: Any, dims: tuple[int, int]) -> tuple[Any, Any]:
    """``query=`` or ``kv_cache=`` as its two parts: a tensor with both side by side in the last dimension, a pair, or
    a pair of these."""
    if isinstance(value, (tuple, list)) and len(value) == 2:
        tensors = [x for x in value if isinstance(x, torch.Tensor)]
        if len(tensors) == 2:
            return tensors[0], tensors[1]
        value = tensors[0] if tensors else None
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is {type(value).__name__}: pass a tensor, or a tuple of its two parts.")
    if value.dim() != 3 or value.size(-1) != sum(dims):
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}, but it must have 3 dimensions, the last one of {dims[0]} + "
            f"{dims[1]} columns."
        )
    return value[..., : dims[0]], value[..., dims[0] :]
