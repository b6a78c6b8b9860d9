"""Direct runs of planned batches: what ``_C.direct_run`` launches, and what it leaves to Python. Of caches in pages:
test_direct_pages.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from recorded_calls import BF16, CPU, CUDA, E4M3, HALF, Gpu, faults_of_matrix, rows_of, view
from recorded_runs import PAGES, Batch, ints


@pytest.fixture
def ragged(gpu: Gpu) -> Batch:
    return Batch(gpu)


@pytest.fixture
def paged(gpu: Gpu) -> Batch:
    return Batch(gpu, page_size=16)


# --- what is launched ---


def test_a_ragged_run_as_it_is_launched(ragged: Batch) -> None:
    given = ragged.arguments()
    out = ragged.run()(*given.values())
    launched = ragged.gpu.launched()
    assert out.shape == (8, 4, 128) and out.dtype == HALF
    for name, want in (
        ("q", view(given["q"])),
        ("k", view(given["k"])),
        ("v", view(given["v"])),
        ("o", view(out)),
        ("lse", (0, 0, 0)),
        ("dtypes", ("float16",) * 3),
        ("heads", (4, 2)),
        ("head_dims", (64, 128)),
        ("batch_size", 2),
        ("totals", (8, 30)),
        ("indptrs", (ragged.qo_indptr.data_ptr(), ragged.kv_indptr.data_ptr())),
        ("causal", True),
        ("window_left", -1),
        ("chunk_size", 0),
        ("scales", (0.125, 0.0, 1.0)),
        ("mask", (0, 0, 0)),
        ("alibi", 0),
        ("sinks", 0),
        ("device", 0),
        ("stream", 64),
    ):
        assert launched[name] == want, name
    at = ragged.workspace.data_ptr()
    assert at <= launched["tile_list"] < at + ragged.workspace.nbytes
    assert ragged.gpu.module.current_device() == 64


def test_heads_before_tokens(ragged: Batch) -> None:
    k, v = rows_of(2, 30, 64, every=3), rows_of(2, 30, 128, every=2)
    ragged.run(hnd=True)(*ragged.arguments(k=k, v=v).values())
    launched = ragged.gpu.launched()
    assert launched["k"] == view(k.transpose(0, 1)) and launched["v"] == view(v.transpose(0, 1))
    assert launched["totals"] == (8, 30)


def test_every_option_arrives(ragged: Batch) -> None:
    places = dict(out=rows_of(8, 4, 128, every=2), lse=torch.zeros(4, 9).t()[:8], sinks=torch.zeros(4), return_lse=True)
    slopes, bits, starts = torch.zeros(4), torch.zeros(70, dtype=torch.uint8), ints(0, 13, 69)
    run = ragged.run("fa3", alibi=slopes, bits=bits, bits_indptr=starts)
    ragged.options = SimpleNamespace(
        causal=False, pos_encoding_mode="NONE", window_left=7, logits_soft_cap=30.0, sm_scale=0.5
    )
    out, lse = run(*ragged.arguments(q_scale=1.5, k_scale=2, v_scale=0.25, **places).values())
    assert out is places["out"] and lse is places["lse"] and not ragged.gpu.made
    launched = ragged.gpu.launched()
    assert launched["o"] == view(out) and launched["lse"] == (lse.data_ptr(), 1, 9)
    assert launched["sinks"] == places["sinks"].data_ptr() and launched["alibi"] == slopes.data_ptr()
    assert launched["mask"] == (bits.data_ptr(), starts.data_ptr(), 18)
    assert launched["causal"] is False and launched["window_left"] == 7 and launched["backend"] == "fa3"
    assert launched["scales"] == (1.5, 30.0, 0.25)


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_new_outputs(ragged: Batch, dim: int, zero: bool) -> None:
    """With rows that no kernel writes they are zeros; else like contiguous queries that are as wide."""
    ragged.request.head_dim_vo = dim
    changes = dict(q=rows_of(8, 4, 64), v=rows_of(30, 2, dim))
    out = ragged.run(zero=zero)(*ragged.arguments(**changes).values())
    (made,) = ragged.gpu.made
    assert made[0] == ("zeros" if zero else "empty_like" if dim == 64 else "empty") and made[1] is out
    assert out.shape == (8, 4, dim) and out.dtype == HALF
    assert ragged.gpu.launched()["o"] == view(out)


@pytest.mark.parametrize("q", [rows_of(8, 4, 64, every=2), rows_of(8, 4, 64, wide=8), rows_of(16, 4, 64)[::2]])
def test_no_output_is_like_queries_with_gaps(ragged: Batch, q: torch.Tensor) -> None:
    ragged.request.head_dim_vo = 64
    out = ragged.run()(*ragged.arguments(q=q, v=rows_of(30, 2, 64)).values())
    assert ragged.gpu.made[0][0] == "empty" and out.is_contiguous()


def test_new_lse(ragged: Batch) -> None:
    _, lse = ragged.run()(*ragged.arguments(return_lse=True).values())
    assert lse.shape == (8, 4) and lse.dtype == torch.float32
    assert ragged.gpu.launched()["lse"] == (lse.data_ptr(), 4, 1)


def test_lse_of_rows_that_no_kernel_writes(ragged: Batch) -> None:
    """They are -inf, which Python writes; a caller's own LSE is left as it is."""
    assert not ragged.accepts(dict(zero=True), return_lse=True)
    assert ragged.accepts(dict(zero=True), return_lse=True, lse=torch.zeros(8, 4))


def test_fp8(gpu: Gpu) -> None:
    batch = Batch(gpu, dtype=E4M3)
    assert batch.run()(*batch.arguments().values()).dtype == HALF
    assert gpu.launched()["dtypes"] == ("float8_e4m3fn", "float8_e4m3fn", "float16")
    batch.request.head_dim_vo = 64  # an output as wide as the queries, but not of their type
    alike = batch.arguments(q=rows_of(8, 4, 64, dtype=E4M3), v=rows_of(30, 2, 64, dtype=E4M3))
    assert batch.run()(*alike.values()).dtype == HALF
    assert gpu.launched()["dtypes"][2] == "float16"
    for page_size, accepted in ((8, True), (12, False), (16, True)):
        assert Batch(gpu, page_size, E4M3).accepts() == accepted
        assert Batch(gpu, page_size, HALF).accepts()


def test_scratch_of_split_keys(gpu: Gpu) -> None:
    batch = Batch(gpu, max_kv_len=5000)
    assert batch.run()(*batch.arguments().values()) is not None
    launched, at = gpu.launched(), batch.scratch.data_ptr()
    assert launched["splits"] > 0 and batch.scratch_bytes > 0
    assert at <= launched["partial_o"] < at + batch.scratch.nbytes
    for less, fits in ((0, True), (1, False)):
        run = batch.run(scratch_bytes=batch.scratch_bytes - less)
        if fits:
            assert gpu.accepts(run, *batch.arguments().values())
            continue
        with pytest.raises(RuntimeError, match="needs a workspace of"):
            run(*batch.arguments().values())
        assert not gpu.module.take_launches()


def test_captured_runs(ragged: Batch) -> None:
    for captured, capturing, accepted in ((True, False, True), (False, True, True), (True, True, False)):
        ragged.gpu.module.set_capturing(capturing)
        assert ragged.accepts(dict(captured=captured)) == accepted
    ragged.gpu.module.set_capturing(False)


def test_a_run_on_another_gpu(ragged: Batch) -> None:
    given = ragged.arguments(out=rows_of(8, 4, 128))
    for x in (given[name] for name in ("q", "k", "v", "out")):
        ragged.gpu.tell(x, device=(CUDA, 3))
    assert ragged.run(device=0)(*given.values()) is None
    assert ragged.run(device=3)(*given.values()) is given["out"]
    launched = ragged.gpu.launched()
    assert launched["device"] == 3 and launched["stream"] == 67
    assert ragged.gpu.module.current_device() == 64


# --- what is accepted, and what is left to Python ---


@pytest.mark.parametrize(
    "rows,most,accepted", [(8, 1, True), (7, 8, False), (9, 9, False), (-1, 8, True), (-1, 7, False)]
)
def test_rows_of_a_run(ragged: Batch, rows: int, most: int, accepted: bool) -> None:
    assert ragged.accepts(dict(rows=rows, most_rows=most)) == accepted


def test_fewer_rows_than_the_most(ragged: Batch) -> None:
    assert ragged.run(rows=-1, most_rows=9)(*ragged.arguments(q=rows_of(7, 4, 64)).values()).shape == (7, 4, 128)
    assert ragged.gpu.launched()["totals"] == (7, 30)


@pytest.mark.parametrize("batch,held", [("ragged", 30), ("paged", PAGES)])
def test_rows_and_pages_of_keys(request: pytest.FixtureRequest, batch: str, held: int) -> None:
    for least, accepted in ((held, True), (held + 1, False), (0, True)):
        assert request.getfixturevalue(batch).accepts(dict(least_kv=least)) == accepted


def test_more_keys_than_are_planned(ragged: Batch) -> None:
    ragged.run()(*ragged.arguments(k=rows_of(31, 2, 64), v=rows_of(31, 2, 128)).values())
    assert ragged.gpu.launched()["totals"] == (8, 31)


LEFT_TO_PYTHON = {
    "q that is no tensor": dict(q=[1.0]),
    "q of another type": dict(q=rows_of(8, 4, 64, dtype=BF16)),
    "other query heads": dict(q=rows_of(8, 2, 64)),
    "other dimension of q": dict(q=rows_of(8, 4, 128)),
    "no k": dict(k=None),
    "no v": dict(v=None),
    "k of another type": dict(k=rows_of(30, 2, 64, dtype=BF16)),
    "v of another type": dict(v=rows_of(30, 2, 128, dtype=BF16)),
    "other heads of k": dict(k=rows_of(30, 4, 64)),
    "other heads of v": dict(v=rows_of(30, 4, 128)),
    "other dimension of k": dict(k=rows_of(30, 2, 128)),
    "other dimension of v": dict(v=rows_of(30, 2, 64)),
    "more keys": dict(k=rows_of(31, 2, 64)),
    "more values": dict(v=rows_of(31, 2, 128)),
    "fewer keys and values": dict(k=rows_of(29, 2, 64), v=rows_of(29, 2, 128)),
    "pages where none are planned": dict(k=(rows_of(30, 1, 2, 64), rows_of(30, 1, 2, 128)), v=None),
    "q_scale in a text": dict(q_scale="1"),
    "k_scale in a tensor": dict(k_scale=torch.ones(1)),
    "v_scale in a tensor": dict(v_scale=torch.ones(1)),
    "list of sinks": dict(sinks=[torch.zeros(4)]),
    "sinks of another size": dict(sinks=torch.zeros(2)),
    "return_lse that is no bool": dict(return_lse=1),
    "lse of other rows": dict(lse=torch.zeros(7, 4)),
    "out of another type": dict(out=torch.zeros(8, 4, 128)),
    "out of other rows": dict(out=rows_of(7, 4, 128)),
}
OPTIONS_LEFT_TO_PYTHON = {
    "another encoding": dict(pos_encoding_mode="ROPE_LLAMA"),
    "causal that is no bool": dict(causal=1),
    "window that is no integer": dict(window_left=3.0),
    "cap that is no number": dict(logits_soft_cap="30"),
    "scale in a tensor": dict(sm_scale=torch.ones(1)),
}


@pytest.mark.parametrize("change", LEFT_TO_PYTHON)
def test_what_is_left_to_python(ragged: Batch, change: str) -> None:
    assert ragged.accepts()
    assert not ragged.accepts(**LEFT_TO_PYTHON[change])


@pytest.mark.parametrize("change", OPTIONS_LEFT_TO_PYTHON)
def test_options_that_are_left_to_python(ragged: Batch, change: str) -> None:
    for name, value in OPTIONS_LEFT_TO_PYTHON[change].items():
        setattr(ragged.options, name, value)
    assert not ragged.accepts()


def test_a_run_that_is_refused(ragged: Batch) -> None:
    given = ragged.arguments(v_scale=1e300)
    assert not ragged.gpu.accepts(ragged.run(), *given.values(), planned=True)


def test_an_encoding_that_cannot_be_compared(ragged: Batch) -> None:
    class Mode:
        def __eq__(self, other: object) -> bool:
            raise ValueError

        __hash__ = None  # type: ignore[assignment]

    ragged.options.pos_encoding_mode = Mode()
    assert not ragged.accepts()


def test_a_mask_that_stands_for_causal(ragged: Batch) -> None:
    for mask, planned, causal, accepted in (
        (True, True, False, False),
        (True, False, True, False),
        (True, True, True, True),
        (False, True, False, True),
    ):
        ragged.options.causal = causal
        assert ragged.accepts(dict(mask_is_causal=mask, causal=planned)) == accepted


def test_what_is_no_run(ragged: Batch) -> None:
    arguments = list(ragged.arguments().values())
    for wrong in (arguments[:-1], [*arguments, None]):
        with pytest.raises(TypeError, match="number of arguments"):
            ragged.run()(*wrong)
    for name in vars(ragged.options):
        fewer = SimpleNamespace(**{other: x for other, x in vars(ragged.options).items() if other != name})
        with pytest.raises(AttributeError, match=name):
            ragged.run()(*ragged.arguments(options=fewer).values())


@pytest.mark.parametrize("device", [(CUDA, 1), (CPU, 0)], ids=["another GPU", "the CPU"])
@pytest.mark.parametrize("name", ["q", "k", "v", "sinks", "out", "lse"])
def test_tensors_of_two_devices(ragged: Batch, name: str, device: tuple[int, int]) -> None:
    given = ragged.arguments(out=rows_of(8, 4, 128), lse=torch.zeros(8, 4), sinks=torch.zeros(4))
    run = ragged.run()
    assert ragged.gpu.accepts(run, *given.values())
    ragged.gpu.tell(given[name], device=device)
    assert not ragged.gpu.accepts(run, *given.values())


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
@pytest.mark.parametrize("hnd", [False, True], ids=["NHD", "HND"])
def test_tensors_as_no_kernel_reads_them(ragged: Batch, hnd: bool, name: str) -> None:
    given = ragged.arguments(out=rows_of(8, 4, 128, every=2))
    if hnd:
        given |= dict(k=rows_of(2, 30, 64, every=2), v=rows_of(2, 30, 128, every=2))
    run, x = ragged.run(hnd=hnd), given[name]
    assert ragged.gpu.accepts(run, *given.values())
    for fault, facts in faults_of_matrix(x, hnd=hnd and name in "kv").items():
        ragged.gpu.tell(x, **facts)
        assert not ragged.gpu.accepts(run, *given.values()), fault
