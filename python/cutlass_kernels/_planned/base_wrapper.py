"""What the batch wrappers share: planning, CUDA-graph buffers, and running with the options in effect.

``plan()`` has two halves. Preparing checks all arguments and builds a ``Plan`` without touching the wrapper;
committing stores it. So a plan that fails leaves the previous one in force. A plan depends on lengths and sizes only:
mask, scale, cap, window and encoding are attributes of the wrapper that take effect when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .._compute import kernels, request_facts, selection
from .._core import checks, extra_arguments, hints, index_vectors, tracing
from .._core.autograd import written
from .._core.problems import Copies, Mask, MultiItem, Offsets, PagedKv, Pages, RaggedKv, Split, Vector
from .._core.run_options import Options, Result, RunArgs, Shape
from .._graphs import operators
from .._masks import mask_packing
from . import index_buffers
from .batch_plans import Place, Plan, request_of
from .batches import Batch, Index
from .copying import LEAST_WORKSPACE, Copied, DryRun
from .descriptions import describe
from .index_buffers import IndexBuffer, Option


class BatchPrefillWrapper(DryRun, Copied):
    """Base of the paged and the ragged wrapper. Attributes with an underscore are read by serving engines."""

    _causal = Option()
    _pos_encoding_mode = Option()
    _window_left = Option()
    _logits_soft_cap = Option()
    _sm_scale = Option()
    _rope_scale = Option()
    _rope_theta = Option()
    _use_fp16_qk_reduction = Option("fp16_qk_reduction")
    _qo_indptr_buf = IndexBuffer()
    _pin_memory_int_workspace_buffer: torch.Tensor | None = None  # FlashInfer's plans need one; engines pass it on

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        buffers: dict[str, torch.Tensor | None],
        custom_mask_buf: torch.Tensor | None,
        mask_indptr_buf: torch.Tensor | None,
        backend: str,
        jit: dict[str, Any],
    ) -> None:
        extra_arguments.unsupported(type(self).__name__, "nothing is compiled at run time; leave it out.", **jit)
        if backend not in selection.CHOICES:
            raise ValueError(f"backend={backend!r} is unknown: use one of {', '.join(selection.CHOICES)}.")
        self._kv_layout = checks.kv_layout(kv_layout)
        self._float_workspace_buffer = checks.workspace("float_workspace_buffer", float_workspace_buffer)
        self.device = self._float_workspace_buffer.device
        self._own_int_workspace = self._int_workspace_buffer = kernels.int_workspace(self.device)
        self._number = operators.number_of(self)
        self._traced_options: Options | None = None
        self._requested_backend = backend
        self._backend = backend
        self._use_cuda_graph = checks.flag("use_cuda_graph", use_cuda_graph)
        self._place = Place(self.device, self._kv_layout, backend, self._use_cuda_graph)
        self._fixed_batch_size = 0
        self._max_total_num_rows: int | None = None
        self._plan_info: Plan | None = None
        self._sinks: torch.Tensor | None = None
        self._custom_mask_buf: torch.Tensor | None = None
        self._mask_indptr_buf: torch.Tensor | None = None
        self._graph_mask = False
        self._graph_mask_words: torch.Tensor | None = None  # the mask buffer, or the copy of it that kernels read
        self._graph_general: bool | None = None
        self._graph_rows: str | None = None  # the first plan's: captured runs keep their kernel
        self._graph_split: tuple[int, bool, int] | None = None
        if self._use_cuda_graph:
            self._check_buffers(buffers)
            self._take_mask_buffers(custom_mask_buf, mask_indptr_buf)
        # Index vectors by the names of their buffers.
        self._stored: Mapping[str, Any] = {x: buffer if self._use_cuda_graph else None for x, buffer in buffers.items()}
        self._options = Options(False, "NONE", -1, 0.0, None, None, None, False)
        self._cached_q_data_type: torch.dtype | None = None
        self._cached_kv_data_type: torch.dtype | None = None
        self._cached_o_data_type: torch.dtype | None = None

    # --- public, shared ---

    def __repr__(self) -> str:
        return describe(self)

    @property
    def _asked_backend(self) -> str:
        """What the constructor was told, or what the environment puts in its place."""
        return selection.asked_for(self._requested_backend)

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor | None = None
    ) -> None:
        """Replaces the scratch buffers; call plan() again before running.

        Args:
            float_workspace_buffer: contiguous, 16-byte aligned; its device becomes the wrapper's.
            int_workspace_buffer: the same for index data (``workspace_size`` says how much a plan needs: at most 8 MiB,
                but for a small ``fixed_split_size``). None keeps the present one. One that the wrapper has allocated
                itself grows as needed, until a CUDA graph may read it.

        Raises:
            ValueError: a buffer is not aligned or not contiguous, or the two are on different devices.
        """
        new_float = checks.workspace("float_workspace_buffer", float_workspace_buffer)
        if int_workspace_buffer is not None:
            new_int = checks.workspace("int_workspace_buffer", int_workspace_buffer)
        elif new_float.device == self.device:
            new_int = self._int_workspace_buffer
        else:
            new_int = self._own_int_workspace = kernels.int_workspace(new_float.device)
        if new_int.device != new_float.device:
            raise ValueError(
                f"int_workspace_buffer is on {new_int.device} and float_workspace_buffer on {new_float.device}: "
                "allocate both on the device of queries and keys."
            )
        self._shares_int_workspace &= new_int is self._int_workspace_buffer
        self._float_workspace_buffer, self._int_workspace_buffer = new_float, new_int
        self.device = new_float.device
        self._place = self._place._replace(device=self.device)
        self._plan_info = None

    def plan(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def run(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def run_return_lse(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """``run`` with ``return_lse=True``."""
        return self.run(*args, return_lse=True, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def forward_return_lse(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """``forward`` with ``return_lse=True``."""
        return self.forward(*args, return_lse=True, **kwargs)

    def end_forward(self) -> None:
        """Does nothing; kept for callers that pair it with begin_forward."""

    def _forward(self, values: Options, run: Callable[[], Result]) -> Result:
        """Runs with other options, which stay in effect if the run succeeds."""
        if tracing.is_traced():  # the run takes them along: when its graph runs, they are set
            self._traced_options = values
            try:
                return run()
            finally:
                self._traced_options = None
        self._planned()
        before, self._options = self._options, values
        try:
            return run()
        except BaseException:
            self._options = before
            raise

    def _planned(self) -> Plan:
        if self._plan_info is None:
            raise RuntimeError(f"{type(self).__name__} has no plan: call plan() before run().")
        return self._plan_info

    @property
    def _most_rows(self) -> int | None:
        """Rows that q may have under CUDA graphs; None: the plan knows."""
        return self._max_total_num_rows if self._use_cuda_graph else None

    def _check_q(self, q: torch.Tensor, plan: Plan) -> None:
        plan.check_q(q, self._most_rows)

    def _check_window(self, window_left: int | None) -> None:
        if window_left is not None and checks.window(window_left) != checks.window(self._window_left):
            raise AssertionError(f"window_left={window_left}, but {self._window_left} is planned: pass it to plan().")

    def _run(self, plan: Plan, q: torch.Tensor, kv: RaggedKv | PagedKv, args: RunArgs) -> Result:
        """Runs ``plan`` on checked tensors with the options in effect."""
        result = plan.run(self._options, self._qo_indptr_buf, q, kv, args)
        if self._use_cuda_graph and self._max_total_num_rows is None:  # planned from offsets on the device
            self._max_total_num_rows = q.size(0)
        return result

    def _run_tensors(self, k: torch.Tensor, v: torch.Tensor | None) -> tuple[Any, ...]:
        """The arguments of run() behind q, from those that an operator takes."""
        return k, v

    # --- buffers ---

    def _check_buffers(self, buffers: dict[str, torch.Tensor | None]) -> None:
        index_buffers.check_indices(buffers, self.device)
        batch = buffers["qo_indptr_buf"].numel() - 1  # type: ignore[union-attr]
        if batch < 0:
            raise ValueError("qo_indptr_buf is empty: it must have batch_size + 1 elements.")
        self._fixed_batch_size = batch

    def _take_mask_buffers(self, bits: torch.Tensor | None, indptr: torch.Tensor | None) -> None:
        if (bits is None) != (indptr is None):
            raise ValueError("custom_mask_buf and mask_indptr_buf (qk_indptr_buf) go together: give both or none.")
        if bits is None or indptr is None:
            return
        index_buffers.check("custom_mask_buf", bits, torch.uint8, self.device)
        index_buffers.check("mask_indptr_buf", indptr, torch.int32, self.device)
        if indptr.numel() != self._fixed_batch_size + 1:
            raise ValueError(
                f"mask_indptr_buf has {indptr.numel()} elements, but qo_indptr_buf {self._fixed_batch_size + 1}: they "
                "must be equal."
            )
        self._custom_mask_buf, self._mask_indptr_buf, self._graph_mask = bits, indptr, True
        self._graph_mask_words = mask_packing.whole_words(bits)

    def _index(self, tensor: torch.Tensor) -> Index:
        """``tensor`` on the wrapper's device. A CPU tensor is copied, so the caller may change it at once."""
        if tensor.device == self.device and tensor.device.type != "cpu":
            return Index(tensor, None)
        if tensor.device.type != "cpu":
            if self.device.type == "cpu":
                raise ValueError(
                    f"a tensor given to plan() is on {tensor.device}, but the workspace of this wrapper on the CPU: "
                    "allocate the workspace on the device of queries and keys."
                )
            return Index(tensor.to(self.device), None)
        if self.device.type == "cpu":
            host = tensor.clone()
            return Index(host, host)
        pinned = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
        return Index(pinned.to(self.device, non_blocking=True), pinned)

    # --- plan ---

    def _check_batch(self, batch: int) -> None:
        if self._use_cuda_graph and batch != self._fixed_batch_size:
            raise ValueError(
                f"this wrapper was made for CUDA graphs with batch_size={self._fixed_batch_size}, but the plan has "
                f"{batch} requests: pad the batch with empty requests, or make another wrapper."
            )

    def _prepare(
        self,
        shape: Shape,
        values: Options,
        batch: Batch,
        split: Split,
        custom_mask: torch.Tensor | None,
        packed_custom_mask: torch.Tensor | None,
        items: MultiItem | None,
        seq_lens_q: torch.Tensor | None,
        keep_mask: bool = False,
    ) -> Plan:
        """Checks what all wrappers check and chooses the backend; writes nothing but new tensors.

        ``keep_mask``: the mask buffers of a CUDA graph hold the mask, and stay as they are.
        """
        if values.pos_encoding_mode != "NONE":
            checks.rope_dim(values.pos_encoding_mode, shape.head_dim_qk)
        user_mask = custom_mask is not None or packed_custom_mask is not None
        if seq_lens_q is not None:
            hints.tensor("seq_lens_q", seq_lens_q)
        told_rows = None
        total_q = batch.qo.last
        if total_q is None and seq_lens_q is not None and seq_lens_q.device.type == "cpu":
            told_rows = index_vectors.index_vector("seq_lens_q", seq_lens_q, batch.size).to(torch.int64)
            total_q = int(told_rows.sum())
        limit = self._max_total_num_rows
        if self._use_cuda_graph and total_q is not None and limit is not None and total_q > limit:
            raise ValueError(
                f"qo_indptr ends at {total_q}: the total number of rows cannot exceed the {limit} of the first plan "
                "or run, for which the CUDA graph was captured."
            )
        bits, bits_indptr = None, None
        keep_mask = keep_mask and self._graph_mask and items is None
        if keep_mask:
            bits, bits_indptr = self._custom_mask_buf, self._mask_indptr_buf
        elif items is not None or user_mask or self._graph_mask:  # lengths are read for masks alone
            qo_lens = index_vectors.lens(batch.qo.known) if told_rows is None else told_rows
            kv_lens = batch.kv_lens
            if items is not None:
                if not self._use_cuda_graph and self._asked_backend != "reference":
                    qo_lens, kv_lens = mask_packing.lens_on_host(qo_lens, kv_lens)
                items = mask_packing.of_requests(items, kv_lens.numel())
                mask_packing.check_items(items, qo_lens, kv_lens)
                tensors = (self._index(items.prefix_len).tensor, self._index(items.token_pos).tensor)
                items = MultiItem(*tensors, items.token_pos_len, items.max_item_len)
                if self._makes_bits_of_items(qo_lens, kv_lens):
                    bits, bits_indptr = self._pack(None, None, mask_packing.keys_of_items(items), qo_lens, kv_lens)
            else:
                rule = mask_packing.keys_before if values.causal else mask_packing.every_key
                bits, bits_indptr = self._pack(custom_mask, packed_custom_mask, rule, qo_lens, kv_lens)
        request = self._facts(shape, values, batch, split, total_q, bits is not None, items is not None)
        backend = selection.select(self._requested_backend, request)
        mask_is_causal = bits is not None and not (user_mask or keep_mask) and items is None
        if values.pos_encoding_mode == "ALIBI":
            checks.alibi_slopes(shape.num_qo_heads, self.device)  # so that captured runs need not compute them
        return Plan(
            self._place,
            shape,
            batch,
            total_q,
            values,
            bits,
            bits_indptr,
            items,
            mask_is_causal,
            request,
            backend,
            split,
        )

    def _facts(
        self,
        shape: Shape,
        values: Options,
        batch: Batch,
        split: Split,
        total_q: int | None,
        masked: bool,
        multi_item: bool,
    ) -> request_facts.Request:
        """What decides the backend of a plan."""
        page_size, layout = batch.page_size, None
        if page_size is None and max(total_q or 0, batch.kv.last or 0) > request_facts.ORDINARY:
            layout = request_facts.Layout.of(total_q or 0, batch.kv.last or 0)
        of_rows = self._graph_rows
        if of_rows is None:
            dims, group_size = (shape.head_dim_qk, shape.head_dim_vo), shape.num_qo_heads // shape.num_kv_heads
            kv_dtype = shape.cast or shape.kv_dtype
            sizes = (total_q, batch.size, group_size, dims, split.alone)
            of_rows = request_facts.feature_of_rows(shape.q_dtype, kv_dtype, *sizes)
        window, cap = values.window_left >= 0, values.logits_soft_cap > 0.0
        mode, causal = values.pos_encoding_mode, values.causal
        return request_of(self.device, shape, mode, causal, window, cap, masked, multi_item, page_size, of_rows, layout)

    def _pack(
        self,
        custom_mask: torch.Tensor | None,
        packed: torch.Tensor | None,
        rule: mask_packing.Rule,
        qo_lens: torch.Tensor,
        kv_lens: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The mask (of ``rule`` where there is no other) as bits and byte offsets on the wrapper's device, without
        reading CUDA lengths. Bits that do not go to the buffers of a CUDA graph are whole words."""
        if self._use_cuda_graph and not self._graph_mask:
            raise ValueError(
                "a custom mask under CUDA graphs needs custom_mask_buf and mask_indptr_buf in the constructor."
            )
        sized = not qo_lens.is_cuda and not kv_lens.is_cuda
        room = self._custom_mask_buf.numel() if self._graph_mask and self._custom_mask_buf is not None else 0
        if packed is not None:
            offsets = mask_packing.check_packed_mask(packed, qo_lens, kv_lens)
            bits = self._index(packed).tensor
        elif custom_mask is not None:
            if not sized:
                custom_mask = custom_mask.to(self.device, non_blocking=True)
            bits, offsets = mask_packing.pack_mask(custom_mask, qo_lens, kv_lens)
        else:
            bits, offsets = mask_packing.mask_of_rule(rule, qo_lens, kv_lens, room, self.device)
        bits, offsets = bits.to(self.device, non_blocking=True), offsets.to(self.device, non_blocking=True)
        if self._graph_mask:
            if bits.numel() > room and sized:
                raise RuntimeError(
                    f"the packed mask takes {bits.numel()} bytes, but custom_mask_buf has {room}: make it larger."
                )
            return bits[:room], offsets  # of lengths on the device, its size is an upper bound
        return mask_packing.whole_words(bits), offsets

    def _makes_bits_of_items(self, qo_lens: torch.Tensor, kv_lens: torch.Tensor) -> bool:
        """Whether multi-item scoring becomes the mask that kernels need: not where its size, or its place in a CUDA
        graph, is unknown."""
        if self.device.type != "cuda" or self._asked_backend == "reference":
            return False
        return self._graph_mask or not (self._use_cuda_graph or qo_lens.is_cuda or kv_lens.is_cuda)

    def _commit(self, plan: Plan, indices: dict[str, Index]) -> None:
        """Makes ``plan`` the one that runs use. ``indices`` are stored by name, in graph mode by copying."""
        if self._use_cuda_graph:
            self._check_split(plan)
            on_gpu = self.device.type == "cuda" and self._asked_backend != "reference"
            if on_gpu and plan.backend not in selection.KERNEL_BACKENDS:
                raise selection.not_captured(plan.request)
        # In graph mode runs read the buffers, which have room for more pages, and so for more KV splits.
        stored: Mapping[str, Any] = self._stored if self._use_cuda_graph else indices
        if plan.backend in selection.KERNEL_BACKENDS:
            if self._shares_int_workspace and not self._dry_run:
                size = self._int_workspace_buffer.nbytes
                self._own_int_workspace = self._int_workspace_buffer = kernels.grown_workspace(self.device, size)
                self._shares_int_workspace = False
            tail = 0 if self._use_cuda_graph else plan.place_vectors(self._int_workspace_buffer)
            offsets = self._planned_offsets(plan, stored)
            if self._dry_run:
                if offsets.total_q is None:
                    # The rows of the vector that was given: the buffers of a CUDA graph do not hold it yet.
                    offsets.total_q = int(indices["qo_indptr_buf"].tensor[-1])
                partial_bytes, list_bytes = kernels.workspace_size(plan.backend, plan.request, offsets)
                self._needed = max(partial_bytes, LEAST_WORKSPACE), max(list_bytes + tail, LEAST_WORKSPACE)
                return
            self._make_schedule(plan, offsets, indices, tail)
        elif self._dry_run:
            return
        elif self._use_cuda_graph:
            for name, index in indices.items():
                stored[name][: index.numel()].copy_(index.tensor, non_blocking=True)
        self._stored = stored
        if self._graph_mask and plan.bits is not None:
            assert self._custom_mask_buf is not None and self._mask_indptr_buf is not None
            if plan.bits is not self._custom_mask_buf:  # else it is kept
                self._custom_mask_buf[: plan.bits.numel()].copy_(plan.bits, non_blocking=True)
                self._mask_indptr_buf.copy_(plan.bits_indptr, non_blocking=True)  # type: ignore[arg-type]
            assert self._graph_mask_words is not None
            if self._graph_mask_words.data_ptr() != self._custom_mask_buf.data_ptr():
                self._graph_mask_words[: self._custom_mask_buf.numel()].copy_(self._custom_mask_buf)
            plan.bits, plan.bits_indptr = self._graph_mask_words, self._mask_indptr_buf
        elif not self._graph_mask:
            self._custom_mask_buf, self._mask_indptr_buf = plan.bits, plan.bits_indptr
        if self._use_cuda_graph and self._max_total_num_rows is None:
            self._max_total_num_rows = plan.total_q
        if self._use_cuda_graph and plan.schedule is not None:
            self._graph_general = plan.schedule.general
            self._graph_rows = next(iter(plan.request.features & request_facts.ROW_FEATURES), "")
            self._graph_split = self._graph_rule(plan)
        self._cached_q_data_type = plan.shape.q_dtype
        self._cached_kv_data_type = plan.shape.kv_dtype
        self._cached_o_data_type = plan.shape.o_dtype
        self._options = plan.options
        self._backend = plan.backend
        self._plan_info = plan

    def _make_schedule(self, plan: Plan, offsets: Offsets, indices: dict[str, Index], tail: int) -> None:
        """Enqueues the tile list, and before it the copies of the vectors that it is made from."""
        packed, copies = plan.batch.packed, Copies()
        apart: list[torch.Tensor] = []
        if self._use_cuda_graph:
            copies, apart = index_buffers.copies(self._stored, indices)
        elif tail and packed is not None:
            copies = Copies([(packed.address, packed.host_address, packed.size // 4)])
        workspace = self._int_workspace_buffer
        grow = self._grow_int_workspace if workspace is self._own_int_workspace else None
        plan.schedule = kernels.Schedule(plan.backend, plan.request, offsets, workspace, copies, tail, grow)
        del apart  # in the order of the stream
        if self._use_cuda_graph and any(copies):
            written(*(self._stored[name] for name in indices))

    def _grow_int_workspace(self, size: int) -> torch.Tensor:
        """A buffer in the place of the wrapper's own. RuntimeError where CUDA graphs may read the present one."""
        captured = self._use_cuda_graph and self._max_total_num_rows is not None
        if captured or (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            raise RuntimeError(
                f"int_workspace_buffer has {self._int_workspace_buffer.nbytes} bytes, but the tile list of this batch "
                f"needs {size}, and it cannot grow any more, as CUDA graphs read it: pass a larger one to "
                "reset_workspace_buffer() before the first plan."
            )
        self._own_int_workspace = self._int_workspace_buffer = kernels.grown_workspace(self.device, size)
        return self._int_workspace_buffer

    def _vectors(self, plan: Plan, stored: Mapping[str, Vector]) -> tuple[Vector, Vector, Pages | None]:
        """qo_indptr, kv_indptr and the page tables that runs will read."""
        raise NotImplementedError

    @staticmethod
    def _graph_rule(plan: Plan) -> tuple[int, bool, int]:
        return plan.split.fixed_size, plan.split.disabled, plan.split.told

    def _check_split(self, plan: Plan) -> None:
        """ValueError where captured runs, which count on one rule for splitting keys, would find another's list."""
        if self._graph_split not in (None, self._graph_rule(plan)):
            raise ValueError(
                "fixed_split_size, disable_split_kv and max_sequence_kv differ from the first plan of this wrapper, "
                "which captured runs count on: pass the same, or use another wrapper."
            )
        if plan.split.fixed_size and plan.batch.page_size is None and not plan.split.told:
            raise ValueError(
                "fixed_split_size needs max_sequence_kv under CUDA graphs: captured runs serve other lengths."
            )

    def _planned_offsets(self, plan: Plan, stored: Mapping[str, Vector]) -> Offsets:
        """What the tile list of a plan is made from."""
        qo, kv, pages = self._vectors(plan, stored)
        if not self._use_cuda_graph:
            mask = Mask(plan.options.causal, plan.options.window_left)
            total_kv, host = plan.batch.total_kv, plan.batch.qo.host_address
            room = self._float_workspace_buffer
            return Offsets(qo, kv, plan.total_q, total_kv, pages, host, mask, plan.is_general, plan.split, room)
        # What a captured run was told stays the same, whatever is planned later.
        offsets = Offsets(qo, kv, plan.total_q, pages=pages, general=plan.is_general)
        fixed, disabled, told = self._graph_rule(plan)
        offsets.split = Split(fixed, disabled, told, told)
        offsets.partials = self._float_workspace_buffer
        if self._graph_general is not None:
            offsets.general = self._graph_general
        if self._max_total_num_rows is not None:
            offsets.total_q = self._max_total_num_rows
        return offsets
