"""Merging states, packing bits, and asking about the installation."""

from __future__ import annotations

import cutlass_kernels as ck
from cutlass_kernels import utils

from .data import Data, ints
from .entry import Call, no_attention


@no_attention("merge_state", gradients="computed")
def _merge_state(x: Data) -> list[Call]:
    v, s = x.state
    return [Call(ck.merge_state, (y, s, -y, -s)) for y in (v, v.half(), v.double())]


@no_attention("merge_states", gradients="computed")
def _merge_states(x: Data) -> list[Call]:
    v, s = x.randn(5, 3, 4, 64), x.randn(5, 3, 4)
    return [Call(ck.merge_states, (y, s)) for y in (v, v.half(), v.double())]


@no_attention("merge_state_in_place", gradients="computed")
def _merge_in_place(x: Data) -> list[Call]:
    def call(v, s, *others):
        ck.merge_state_in_place(v, s, *others)
        return v.clone(), s.clone()

    states, mask = (*x.state, *(-y for y in x.state)), x.here(1, 0, 1, 0, 1).bool()
    return [Call(call, states, writes=True), Call(call, (*states, mask), writes=True)]


@no_attention("packbits")
def _packbits(x: Data) -> list[Call]:
    bits = x.rand(100) < 0.5
    return [
        Call(ck.packbits, (bits,)),
        Call(lambda y: ck.packbits(y, "little"), (bits,)),
        Call(ck.packbits, (x.here(*range(13)),)),
    ]


@no_attention("segment_packbits", compiles="no")
def _segment_packbits(x: Data) -> list[Call]:
    return [Call(lambda *t: ck.segment_packbits(*t)[0] + 1, (x.rand(100) < 0.5, ints(0, 3, 100)))]


@no_attention("list_kernels", compiles="no")
def _list_kernels(x: Data) -> list[Call]:
    return [Call(lambda q: q + len(ck.list_kernels()), (x.q,))]


@no_attention("explain", compiles="no")
def _explain(x: Data) -> list[Call]:
    return [Call(lambda q: q + 1 if ck.explain(q).selected else q, (x.q,))]


@no_attention("utils.get_trtllm_gen_multi_ctas_kv_counter_bytes", compiles="no")
def _counter_bytes(x: Data) -> list[Call]:
    return [Call(lambda q: q + utils.get_trtllm_gen_multi_ctas_kv_counter_bytes(1, 4, 132), (x.q,))]
