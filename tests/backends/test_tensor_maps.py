"""Tensors that fa3's tensor maps cannot describe: a reason, and fa2 under auto, never an error of the driver."""

from __future__ import annotations

from pathlib import Path

import compilers
import pytest
import torch
from compare import assert_close
from pairs import every
from planned_runs import wrapped
from problems import Batch, Options, expect, make_batch

import cutlass_kernels as ck
from cutlass_kernels._compute import request_facts, selection
from cutlass_kernels._core.problems import Logits, Output, Problem, RaggedKv

CAUSAL = Options(causal=True)
GIB = 1 << 30


@pytest.fixture(scope="module")
def c(extension):
    from cutlass_kernels import _C

    built = {(kernel["backend"], kernel["q_dtype"], kernel["head_dim_qk"]) for kernel in _C.list_kernels()}
    if not {("fa2", "float16", 64), ("fa3", "float16", 64)} <= built:
        pytest.skip("this build lacks float16 kernels of head dimension 64 for one of the backends")
    return _C


def reasons(c, backend: str, rows: int = 100, keys: int = 100, heads=(4, 2), **strides: tuple[int, int]) -> list[str]:
    types = ("float16",) * 3
    given = [(name, *two) for name, two in strides.items()]
    features = (False,) * 7
    return c.not_supported_reasons(backend, *types, *heads, 64, 64, *features, 90, rows, keys, given)


# Strides in elements of 2 bytes: of a token less than 16 GiB, of a head less than 1 TiB.
SERVED = {
    "nothing known": {},
    "dense": dict(q=(256, 64), k=(128, 64), v=(128, 64), o=(256, 64)),
    "heads first": dict(q=(64, 6400), k=(64, 6400)),
    "least": dict(k=(8, 8)),
    "longest token": dict(q=(8 * GIB - 8, 64)),
    "longest head": dict(v=(64, 512 * GIB - 8)),
    "one row broadcast": dict(q=(0, 64), rows=1),
    "one key broadcast": dict(k=(0, 64), keys=1),
    "one head broadcast": dict(k=(64, 0), v=(64, 0), heads=(4, 1)),
    "most rows": dict(rows=GIB, keys=GIB),
}
REFUSED = {
    "row broadcast": (dict(q=(0, 64)), "q has a token stride of 0 bytes"),
    "key broadcast": (dict(k=(0, 64)), "k has a token stride of 0 bytes"),
    "head broadcast": (dict(v=(64, 0)), "v has a head stride of 0 bytes"),
    "all broadcast": (dict(k=(0, 0)), "k has a token stride of 0 bytes"),
    "long token": (dict(k=(8 * GIB, 64)), "k has a token stride of 17179869184 bytes"),
    "long head": (dict(q=(64, 512 * GIB)), "q has a head stride of 1099511627776 bytes"),
    "long output": (dict(o=(8 * GIB, 64)), "o has a token stride of 17179869184 bytes"),
    "backwards": (dict(k=(-64, 64)), "k has a token stride of -128 bytes"),
    "rows": (dict(rows=GIB + 1), "total_q=1073741825"),
    "keys": (dict(keys=GIB + 1), "total_kv=1073741825"),
}


@every(given=SERVED)
def test_served(c, given):
    for backend in ("fa3", "fa2", "auto"):
        assert reasons(c, backend, **given) == []


@every(**{"given,words": REFUSED})
def test_refused_with_the_reason(c, given, words):
    (sentence,) = reasons(c, "fa3", **given)
    assert words in sentence and "fa2" in sentence and "auto" in sentence
    assert reasons(c, "fa2", **given) == [] and reasons(c, "auto", **given) == []


def test_a_stride_of_no_multiple_of_16_bytes_is_said_once(c):
    for backend in ("fa3", "fa2"):
        (sentence,) = reasons(c, backend, k=(129, 64))
        assert "258 bytes" in sentence and "multiples of 16" in sentence


def on_hopper(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None = None
) -> request_facts.Request:
    """The request that these tensors would make on such a GPU."""
    out = q.new_empty(q.size(0), q.size(1), v.size(2)) if out is None else out
    request = request_facts.Request.from_problem(Problem(q, RaggedKv(k, v), Logits(1.0), Output(out)))
    return request._replace(device_type="cuda", compute_capability=90)


def tensors(rows: int = 5, keys: int = 30, heads: int = 32, kv_heads: int = 2) -> list[torch.Tensor]:
    """So many heads to a key head that no query is short enough for decode, which would go to fa2."""
    return [torch.zeros(n, h, 64, dtype=torch.float16) for n, h in ((rows, heads), (keys, kv_heads), (keys, kv_heads))]


def test_ordinary_tensors_go_to_fa3(c, clean_environment):
    q, k, v = tensors()
    request = on_hopper(q, k, v)
    assert request.layout is None
    assert selection.select("auto", request) == "fa3"


def test_views_go_where_they_can_be_read(c, clean_environment):
    q, k, v = tensors()
    one = tensors(rows=1, kv_heads=1)
    packed = torch.zeros(5, 36, 64, dtype=torch.float16)
    far = torch.empty(4 * GIB, dtype=torch.float16, device="meta").as_strided((5, 32, 64), (2 * GIB // 2, 64, 1))
    for request, selected in (
        (on_hopper(q[:1].expand(5, 32, 64), k, v), "fa2"),
        (on_hopper(q, k[:, :1].expand(30, 2, 64), v), "fa2"),
        (on_hopper(q, k, v[:1].expand(30, 2, 64)), "fa2"),
        (on_hopper(one[0].expand(1, 32, 64), one[1].expand(30, 1, 64), one[2]), "fa3"),
        (on_hopper(*packed.split([32, 2, 2], dim=1)), "fa3"),
        (on_hopper(q, *(x.transpose(0, 1).contiguous().transpose(0, 1) for x in (k, v))), "fa3"),
        (on_hopper(far, k, v, q), "fa3"),  # 2 GiB from token to token
    ):
        assert selection.select("auto", request) == selected, str(request)
        if selected == "fa2":
            with pytest.raises(ck.BackendError, match=r"stride of 0 bytes.*fa2"):
                selection.select("fa3", request)


def test_requests_of_all_lengths_share_a_layout(c):
    requests = set()
    for rows, keys in ((2, 2), (50, 300), (300, 50)):
        q, k, v = tensors(rows, keys)
        requests.add(on_hopper(q, k[:, :1].expand(keys, 2, 64), v))
    assert len(requests) == 1


def test_explain_reads_strides(c, clean_environment):
    q = torch.zeros(1, 4, 64, dtype=torch.float16)
    assert ck.explain(q, device="cuda", compute_capability=90).selected == "fa3"
    said = ck.explain(q.expand(5, 4, 64), device="cuda", compute_capability=90)
    assert said.selected == "fa2" and not said.reasons["fa2"]
    assert "q has a token stride of 0 bytes" in str(said)


def broadcast(device: str) -> tuple[Batch, Batch]:
    """A batch with one key head shown as two, and the same as a plain one."""
    plain = make_batch([5, 9], [30, 9], 4, 2, 64, device=device)
    k, v = (x[:, :1].expand(39, 2, 64) for x in (plain.k, plain.v))
    return Batch(plain.qo_lens, plain.kv_lens, plain.q, k, v), plain


@every(device=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_runs_of_one_plan_with_and_without_broadcasts(device):
    """On Hopper, "auto" takes fa3 for those without, and fa2 for the others."""
    views, plain = broadcast(device)
    call = wrapped("auto", plain).plan(CAUSAL)
    for batch in (plain, views, plain, views):
        want = expect(batch, CAUSAL)
        assert_close(call.wrapper.run(batch.q, batch.k, batch.v), want.out, want.baseline)


@pytest.mark.gpu
@pytest.mark.hopper
def test_explicit_fa3_refuses_broadcasts():
    views, plain = broadcast("cuda:0")
    call = wrapped("fa3", plain).plan(CAUSAL)
    with pytest.raises(ck.BackendError, match="k has a head stride of 0 bytes"):
        call.wrapper.run(views.q, views.k, views.v)
    call.check(call.run())
    with pytest.raises(ck.BackendError, match="k has a head stride of 0 bytes"):
        ck.single_prefill_with_kv_cache(views.q, views.k, views.v, backend="fa3")


def test_a_failed_look_up_of_the_driver_is_not_remembered(tmp_path: Path):
    # The third call finds the function, and that is remembered.
    program = tmp_path / "lookup"
    sources = (compilers.ROOT / "tests/cpp/driver_lookup.cpp", compilers.SOURCES / "src/fa3/tensor_map.cpp")
    folders = (compilers.SOURCES / "include", compilers.SOURCES / "src", compilers.cuda_headers())
    includes = [f"-I{folder}" for folder in folders]
    compilers.run(compilers.host_compiler(), "-std=c++17", "-pthread", *includes, *sources, "-o", program)
    assert compilers.run(program).strip() == "3 look-ups, 4 maps"
