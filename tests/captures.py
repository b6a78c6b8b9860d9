"""CUDA graphs of calls and of wrappers, calls that must not wait for the device, and calls beside another stream."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from problems import Batch, Options, graph_buffers
from wrapper_problems import CLASSES, Wrapped


def capture(call: Callable[[], Any], warm_up: int = 1) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of the call, and the results that its replays write. Kernels are loaded before."""
    for _ in range(warm_up):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


def graph_wrapper() -> tuple[Any, list[torch.Tensor]]:
    """A paged wrapper on the CPU for graphs of two requests, and its index buffers."""
    buffers = [torch.zeros(size, dtype=torch.int32) for size in (3, 3, 9, 2)]
    workspace = torch.zeros(1 << 20, dtype=torch.uint8)
    return CLASSES["paged"](workspace, "NHD", True, *buffers), buffers


@contextlib.contextmanager
def no_waiting(on_gpu: bool = True) -> Iterator[None]:
    """What runs inside raises where it waits for the device."""
    if not on_gpu:
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def disturbed(call: Callable[[], Any], stream: torch.cuda.Stream, chance: random.Random) -> Any:
    """While another stream holds some of the multiprocessors, thread blocks start in another order."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(chance.randrange(1, 200_000))
        x = torch.ones(chance.choice([128, 512, 1024]), 512, device=stream.device)
        for _ in range(chance.randrange(1, 6)):
            x = x @ x.T @ x * 1e-6
    return call()


class Captured:
    """A wrapper for CUDA graphs of three requests, with static inputs and outputs, and a buffer for masks if given one.

    ``rows`` are those of all requests. A ragged wrapper has room for as many keys as ``pages`` hold.
    """

    def __init__(
        self,
        target: Any,
        kind: str,
        rows: int = 24,
        page_size: int = 8,
        pages: int = 160,
        form: str = "stacked",
        mask_buffer: torch.Tensor | None = None,
    ) -> None:
        self.target, self.kind, self.page_size, self.form = target, kind, page_size, form
        zeros = functools.partial(torch.zeros, dtype=torch.float16, device=target.device)
        self.q, self.out, self.lse = zeros(rows, 4, 64), zeros(rows, 4, 64), zeros(rows, 4, dtype=torch.float32)
        self.kv: tuple[Any, ...] = tuple(zeros(2, pages * page_size, 2, 64))
        if kind != "ragged":
            stacked = form == "stacked"
            self.kv = (zeros(pages, 2, page_size, 2, 64) if stacked else tuple(zeros(2, pages, page_size, 2, 64)),)
        given = graph_buffers(3, pages, target.device)
        rows_of_requests = given["qo_indptr_buf"]
        if kind == "ragged":
            offsets = dict(qo_indptr_buf=rows_of_requests, kv_indptr_buf=torch.zeros_like(rows_of_requests))
            given = dict(use_cuda_graph=True, **offsets)
        elif kind == "decode":
            del given["qo_indptr_buf"]
            given = {name.replace("_buf", "_buffer"): x for name, x in given.items()}
        self.buffers = [x for x in given.values() if isinstance(x, torch.Tensor)]
        if mask_buffer is not None:
            given |= dict(custom_mask_buf=mask_buffer, mask_indptr_buf=torch.zeros_like(rows_of_requests))
        self.wrapper: Any = CLASSES[kind](target.workspace(), "NHD", backend=target.backend, **given)

    def load(self, batch: Batch, options: Options | None = None, where: str = "cpu", **plan: Any) -> Wrapped:
        """Writes the inputs, and plans. The batch beside the wrapper, to be compared with replays."""
        w = self.write(batch)
        if where == "in buffers":  # as engines write them with kernels of their own
            for buffer, x in zip(self.buffers, w.vectors()):
                buffer[: len(x)] = x
            w.vectors = lambda where: tuple(self.buffers)  # type: ignore[method-assign]
        return w.plan(options, where, **plan)

    def write(self, batch: Batch) -> Wrapped:
        w = Wrapped(self.target, self.kind, batch, self.page_size, form=self.form, wrapper=self.wrapper)
        self.q[: len(batch.q)] = batch.q
        for static, x in zip(self.kv, w.kv):
            pairs = zip(static, x) if isinstance(x, tuple) else [(static, x)]
            for into, new in pairs:
                into[: len(new)] = new
        return w

    def run(self, **scales: Any) -> None:
        self.wrapper.run(self.q, *self.kv, out=self.out, lse=self.lse, return_lse=True, **scales)

    def capture(self, **scales: Any) -> torch.cuda.CUDAGraph:
        return capture(lambda: self.run(**scales))[0]

    def check_replay(self, graph: torch.cuda.CUDAGraph, w: Wrapped, options: Options | None = None) -> None:
        self.out.fill_(7.0)
        self.lse.fill_(7.0)
        graph.replay()
        rows = len(w.batch.q)
        w.check((self.out[:rows], self.lse[:rows]), options)
        # Rows behind the last request keep what was there.
        assert bool((self.out[rows:] == 7.0).all()) and bool((self.lse[rows:] == 7.0).all())
