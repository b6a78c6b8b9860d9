"""The requests of a plan: its index vectors, on the device and where the host has them, and what it knows of them.

Vectors on the CPU are read once, by compiled functions (``bindings/indices.cpp``) that check them and pack them into
one buffer. The kernel that makes the tile list brings them to the device, to the end of the int workspace, so a plan of
128 requests is one launch and allocates nothing. In torch that took half of a plan: 2 to 5 us for every slice and every
number. Slices are made when somebody needs a tensor; kernels take addresses. Vectors on the device are used as they
are: engines keep page numbers there, which are most of a batch, or all of its vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .._core import checks, hints, index_vectors, native
from .._core.problems import Split

MOST_KEYS = (1 << 31) - 1024  # a hint beyond it says nothing that kernels could use
_ALIGN = 4  # a vector starts at a multiple of so many elements, 16 bytes; kAlign in indices.cpp
_MOST_PARAMETERS = 3600  # bytes that kernels take as parameters; kMany in schedule.cu
# Pageable memory of up to so many bytes is copied by the driver while it is asked to, in 4 us. More of it might wait
# for the device, so it goes through pinned memory, which takes 10 us longer.
_MOST_PAGEABLE = 32 << 10


class Index:
    """An index vector on the wrapper's device, and a private host copy where it came from the CPU.

    Like a tensor, it has a device, a size and an address. ``last`` is the last element, where the host knows that.
    """

    __slots__ = ("_host", "_tensor", "last", "size")

    def __init__(self, tensor: torch.Tensor, host: torch.Tensor | None) -> None:
        self._tensor: torch.Tensor | None = tensor
        self._host = host
        self.size = tensor.numel()
        self.last = int(host[-1]) if host is not None and host.numel() else None

    def __reduce__(self) -> Any:  # a copy has tensors, and so addresses, of its own
        return Index, (self.tensor, self.host)

    @property
    def tensor(self) -> torch.Tensor:
        """The vector on the device."""
        assert self._tensor is not None
        return self._tensor

    @property
    def host(self) -> torch.Tensor | None:
        """The host copy."""
        return self._host

    @property
    def host_address(self) -> int:
        """Address of the host copy, 0 where there is none."""
        return 0 if self._host is None else self._host.data_ptr()

    @property
    def known(self) -> torch.Tensor:
        """The host copy where there is one."""
        host = self.host
        return self.tensor if host is None else host

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    def numel(self) -> int:
        return self.size

    def data_ptr(self) -> int:
        return self.tensor.data_ptr()

    @property
    def packed(self) -> Packed | None:
        """What it is a part of."""
        return None

    @property
    def waits(self) -> bool:
        """Whether it is on the host alone, for a plan to copy it."""
        return self.packed is not None and self.packed.waits


class Packed:
    """Vectors one behind the other: on the host (a bytearray and its address), and on the device once a plan has given
    them a place there, or somebody wants a tensor."""

    __slots__ = ("_address", "_begin", "_pinned", "_tensor", "_workspace", "bytes", "device", "host_address", "size")

    def __init__(self, device: torch.device, packed: bytearray, host_address: int) -> None:
        self.device, self.bytes, self.host_address = device, packed, host_address
        self.size = len(packed)  # in bytes
        self._address = self._begin = 0
        self._tensor: torch.Tensor | None = None
        self._pinned: torch.Tensor | None = None
        self._workspace: torch.Tensor | None = None
        if device.type == "cpu":
            self._tensor, self._address = torch.frombuffer(packed, dtype=torch.int32), host_address

    @property
    def waits(self) -> bool:
        """Whether they are on the host alone, for a plan to copy them. A captured copy would read their memory again
        when the graph is replayed, if they are too many for the parameters of a kernel."""
        if self._address or self.size > _MOST_PAGEABLE:
            return False
        return self.size <= _MOST_PARAMETERS or not torch.cuda.is_current_stream_capturing()

    def place(self, workspace: torch.Tensor) -> int:
        """Gives those that wait the end of a workspace on their device, where a plan is to copy them. Returns how many
        of its bytes that takes, also where it has fewer."""
        if not self.waits:
            return 0
        begin = (workspace.nbytes - self.size) // 16 * 16
        if begin < 0:
            return self.size
        self._workspace, self._begin = workspace, begin
        self._address = workspace.data_ptr() + begin
        return workspace.nbytes - begin

    @property
    def address(self) -> int:
        """Address on the device."""
        return self._address or self.tensor.data_ptr()

    @property
    def tensor(self) -> torch.Tensor:
        """All of them on the device."""
        if self._tensor is None:
            if self._workspace is None:
                host = torch.frombuffer(self.bytes, dtype=torch.int32)
                self._pinned = torch.empty_like(host, pin_memory=self.device.type == "cuda").copy_(host)
                self._tensor = self._pinned.to(self.device, non_blocking=True)
                self._address = self._tensor.data_ptr()
            else:
                # torch.compile traces this: it knows neither addresses nor bytearrays.
                place = self._workspace.view(-1).view(torch.uint8)[self._begin : self._begin + self.size]
                self._tensor = place.view(torch.int32)
        return self._tensor


class Part(Index):
    """One of the vectors of ``Packed``."""

    __slots__ = ("_begin", "_packed")

    def __init__(self, packed: Packed, begin: int, size: int, last: int | None) -> None:
        self._packed, self._begin, self.size, self.last = packed, begin, size, last
        self._tensor = self._host = None

    def data_ptr(self) -> int:
        return self._packed.address + 4 * self._begin

    @property
    def packed(self) -> Packed:
        return self._packed

    @property
    def device(self) -> torch.device:
        return self._packed.device

    @property
    def tensor(self) -> torch.Tensor:
        if self._tensor is None:
            self._tensor = self._packed.tensor[self._begin : self._begin + self.size]
        return self._tensor

    @property
    def host(self) -> torch.Tensor:
        if self._host is None:
            host = torch.frombuffer(self._packed.bytes, dtype=torch.int32)
            self._host = host[self._begin : self._begin + self.size]
        return self._host

    @property
    def host_address(self) -> int:
        return self._packed.host_address + 4 * self._begin


def _next(begin: int, size: int) -> int:
    return begin + size + -size % _ALIGN


@dataclass(slots=True)
class Batch:
    """The requests of a plan. ``page_size``, ``last_page_len`` and ``indices`` are None for a ragged batch. As far as
    the host knows: ``longest`` is the number of keys of the longest request, ``page_bound`` the number of pages that a
    cache must have, and ``told_kv_lens`` the keys of each request (int64) where the caller alone tells them."""

    size: int
    qo: Index
    kv: Index
    longest: int | None
    page_size: int | None = None
    last_page_len: Index | None = None
    indices: Index | None = None
    page_bound: int = 0
    told_kv_lens: torch.Tensor | None = None

    @property
    def packed(self) -> Packed | None:
        """What its vectors are parts of; None where kernels take the vectors that they are given."""
        return self.kv.packed

    @property
    def kv_lens(self) -> torch.Tensor:
        """Keys per request (int64), on the host where they are known there. Few plans need them."""
        if self.told_kv_lens is not None:
            return self.told_kv_lens
        if self.last_page_len is None or self.page_size is None:
            return index_vectors.lens(self.kv.known)
        if self.longest is None:
            return index_vectors.paged_kv_lens(self.kv.tensor, self.last_page_len.tensor, self.page_size)
        return index_vectors.paged_kv_lens(self.kv.known, self.last_page_len.known, self.page_size)

    @property
    def total_kv(self) -> int:
        """Keys of all requests, rounded up to pages. Where offsets are on the device, those of all page numbers given,
        or 0 without pages."""
        last, size = self.kv.last, self.page_size or 1
        if last is None:
            last = 0 if self.indices is None else self.indices.size
            if self.longest is not None:  # told by the caller
                last = min(last, self.size * -(-self.longest // size))
        return min(last * size, MOST_KEYS)

    def take_lens(self, seq_lens: torch.Tensor) -> None:
        """Takes what the caller tells of the keys per request; ValueError where the page table contradicts."""
        hints.tensor("seq_lens", seq_lens)
        if seq_lens.is_cuda or (self.longest is not None and self.page_size is None):
            return
        told = index_vectors.index_vector("seq_lens", seq_lens, self.size).to(torch.int64)
        if self.longest is None:
            self.told_kv_lens = told
            self.longest = int(told.max()) if told.numel() else 0
        elif not torch.equal(told, kv_lens := self.kv_lens):
            at = int((told != kv_lens).nonzero()[0])
            raise ValueError(
                f"seq_lens[{at}]={int(told[at])}, but the page table gives request {at} {int(kv_lens[at])} keys: "
                "correct one of them, or leave seq_lens out."
            )

    def split(self, fixed_split_size: int | None, disable_split_kv: bool, max_sequence_kv: int | None) -> Split:
        """The rule by which keys are split. A size of None or -1 is none.

        ValueError for other sizes below 1, and where nothing tells how many KV splits of a fixed size there may be.
        """
        fixed = 0
        size = -1 if fixed_split_size is None else checks.integer("fixed_split_size", fixed_split_size)
        if size != -1:
            if size < 1:
                unit = "keys" if self.page_size is None else "pages"
                raise ValueError(
                    f"fixed_split_size={size} must be at least 1, the {unit} of a KV split; None or -1 sets no size."
                )
            fixed = min(size * (self.page_size or 1), MOST_KEYS)
        told = 0 if max_sequence_kv is None else min(checks.integer("max_sequence_kv", max_sequence_kv), MOST_KEYS)
        most = min(told or self.longest or 0, MOST_KEYS)
        if fixed and self.page_size is None and not told and self.longest is None:
            raise ValueError(
                f"fixed_split_size={fixed_split_size} needs the lengths on the CPU (kv_indptr or seq_lens), or "
                "max_sequence_kv."
            )
        return Split(fixed, checks.flag("disable_split_kv", disable_split_kv), most, told)


def read_offsets(qo: Any, kv: Any, like: torch.Tensor) -> Batch | None:
    """A ragged batch on the device of ``like``; None where a vector is not int32 on the CPU, or is not right."""
    facts = None if native._C is None else native._C.read_offsets(qo, kv)
    if facts is None:
        return None
    size, total_q, total_kv, longest, packed = facts
    all_of = Packed(like.device, *packed)
    qo_part, kv_part = Part(all_of, 0, size + 1, total_q), Part(all_of, _next(0, size + 1), size + 1, total_kv)
    return Batch(size, qo_part, kv_part, longest)


def read_pages(
    qo: Any, kv: Any, last_page_len: Any, indices: Any, page_size: Any, whole: bool, like: torch.Tensor
) -> Batch | None:
    """A paged batch, as ``read_offsets``. Page numbers that no request uses are kept if ``whole``; they may be on
    the device of ``like``, where they are neither read nor copied."""
    facts = None
    if native._C is not None:
        facts = native._C.read_pages(qo, kv, last_page_len, indices, page_size, whole, like)
    if facts is None:
        return None
    size, total_q, end_page, longest, page_bound, count, given, packed = facts
    all_of = Packed(like.device, *packed)
    begin_kv = _next(0, size + 1)
    begin_last = _next(begin_kv, size + 1)
    used: Index
    if count < 0:
        used = Index(indices if whole or end_page == given else indices[:end_page], None)
    else:
        used = Part(all_of, _next(begin_last, size), count, None)
    return Batch(
        size,
        Part(all_of, 0, size + 1, total_q),
        Part(all_of, begin_kv, size + 1, end_page),
        longest,
        page_size,
        Part(all_of, begin_last, size, None),
        used,
        page_bound,
    )


def take_offsets(qo: Any, kv: Any, like: torch.Tensor) -> Batch | None:
    """A ragged batch of vectors that are on the device of ``like``; None where one is not, or they do not fit."""
    sizes = sizes_on(like, qo, kv)
    if sizes is None or not sizes[0] or sizes[1] != sizes[0]:
        return None
    return Batch(sizes[0] - 1, Index(qo, None), Index(kv, None), None)


def take_pages(
    qo: Index | None, kv: Any, last_page_len: Any, indices: Any, page_size: Any, like: torch.Tensor
) -> Batch | None:
    """A paged batch, as ``take_offsets``; None without ``qo``, too."""
    sizes = None if qo is None else sizes_on(like, kv, last_page_len, indices)
    if qo is None or sizes is None or not (type(page_size) is int and page_size > 0):
        return None
    size = qo.size - 1
    if size < 0 or sizes[0] != size + 1 or sizes[1] != size:
        return None
    return Batch(size, qo, Index(kv, None), None, page_size, Index(last_page_len, None), Index(indices, None))


def sizes_on(like: torch.Tensor, *vectors: Any) -> tuple[int, ...] | None:
    """Sizes of int32 vectors that kernels can read as they are; None where one is not on the device of ``like``, which
    is not the CPU."""
    sizes: tuple[int, ...] | None = None if native._C is None else native._C.sizes_on_device(like, *vectors)
    return sizes
