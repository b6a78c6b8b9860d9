"""The table of docs/torch-compile.md: no row is missing, and each is tested with several combinations of arguments."""

from __future__ import annotations

import shutil
import warnings
from typing import Any

import pytest
import torch
from compare import assert_bitwise
from paths import ROOT
from registry import ENTRIES, HEADS, PAGE, Call, Data, Entry, each, ints, several
from torch._dynamo.backends.registry import lookup_backend

import cutlass_kernels as ck

DOCUMENT = ROOT / "docs" / "torch-compile.md"


def rows() -> dict[str, tuple[str, str]]:
    """What the table says of each function: with fullgraph=True, and with mode="reduce-overhead"."""
    table = DOCUMENT.read_text().partition("<!-- compile:begin -->")[2].partition("<!-- compile:end -->")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]
    return {name.strip("`"): (fullgraph, reduce_overhead) for name, fullgraph, reduce_overhead, _ in cells}


ROWS = rows()
traced = each(lambda entry: entry.compiles != "no")


@pytest.fixture(autouse=True)
def fresh_dynamo(the_targets_backend):
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def data(target) -> Data:
    return Data(target)


def forms(entry: Entry, data: Data) -> list[Call]:
    return [form for call in entry.calls(data) for form in call.forms()]


def assert_same(got: Any, want: Any, exact: bool = False) -> None:
    """Bitwise on the CPU. On a GPU kernels merge states, and PyTorch's operators in a graph: last bits may differ if
    that is not ``exact``."""
    got, want = several(got), several(want)
    assert len(got) == len(want)
    for a, b in zip(got, want):
        assert a.stride() == b.stride()
        if a.is_cuda and a.is_floating_point() and a.element_size() > 1 and not exact:
            torch.testing.assert_close(a, b)
        else:
            assert_bitwise(a, b)


def test_the_table_has_a_row_for_every_function():
    """Of the package itself: those of its modules are in the text below it."""
    promised = {name: entry.compiles for name, entry in ENTRIES.items() if "." not in name}
    assert {name: ("no" if how == "no" else "yes", how) for name, how in promised.items()} == ROWS


def assert_marked(operators: list[Any], between_graphs: bool) -> None:
    """Inductor knows which operators may not be captured. Writing to a cache before attention may."""
    unsafe = getattr(torch.Tag, "cudagraph_unsafe", None)  # since torch 2.9
    marked = {str(x): unsafe in getattr(x, "default", x).tags for x in operators}
    if unsafe is not None and between_graphs:
        attends = {name: is_marked for name, is_marked in marked.items() if "append" not in name}
        assert attends and all(attends.values()), marked
    else:
        assert not any(marked.values()), marked


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@traced
def test_fullgraph(data, entry, dynamic):
    """One graph, which computes and writes what the call does."""
    for call in forms(entry, data):
        operators = []

        def backend(graph, inputs):
            called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
            operators.extend(x for x in called if "cutlass_kernels" in str(x))
            return lookup_backend("aot_eager")(graph, inputs)

        torch._dynamo.reset()
        ours, theirs = call.copies(), call.copies()
        got = torch.compile(call.run, fullgraph=True, backend=backend, dynamic=dynamic)(*ours)
        exact = entry.name.startswith(("mla.", "flash_mla."))
        assert_same(got, call.run(*theirs), exact)
        assert_same(ours, theirs, exact)
        assert_marked(operators, entry.compiles == "between graphs")


@each(lambda entry: entry.compiles == "no" and "." not in entry.name)
def test_what_breaks_the_graph(data, entry):
    """The docstring says so. Without fullgraph=True the results are the same."""
    assert "``torch.compile`` cannot trace this" in getattr(ck, entry.name).__doc__
    for call in entry.calls(data):
        torch._dynamo.reset()
        with pytest.raises(RuntimeError):  # of several classes of torch
            torch.compile(call.run, fullgraph=True, backend="aot_eager")(*call.copies())
        torch._dynamo.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # dynamo's, about what it cannot trace
            got = torch.compile(call.run, backend="aot_eager")(*call.copies())
        assert_same(got, call.run(*call.copies()))


@pytest.mark.parametrize("name", [name for name in ENTRIES if hasattr(getattr(ck, name, None), "plan")])
def test_plans_say_that_they_break_the_graph(name):
    assert "``torch.compile`` cannot trace this method" in getattr(ck, name).plan.__doc__


def test_a_plan_inside_breaks_the_graph_and_is_made(data):
    wrapper = data.wrapper("BatchPrefillWithRaggedKVCacheWrapper")

    def call(q, k, v, offsets):
        wrapper.plan(offsets, ints(0, 20), *HEADS, causal=True)
        return wrapper.run(q * 2, k, v) + 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = torch.compile(call, backend="aot_eager")(*data.qkv, ints(0, 5))
    assert_same(got, call(*data.qkv, ints(0, 5)))


def test_new_tokens_reach_the_graph(data):
    """A decode step in one graph: positions, appending, and attention over what was appended."""
    wrapper = data.wrapper("BatchDecodeWithPagedKVCacheWrapper")

    def step(q, key, value, cache, lengths):
        owner, position = ck.get_batch_indices_positions(data.here(0, 1), lengths, q.shape[0])
        ck.append_paged_kv_cache(key, value, owner, position, cache, data.here(1, 2), data.here(0, 2), data.here(4))
        return wrapper.run(q, cache)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    ours, theirs = data.cache.clone(), data.cache.clone()
    for length in (20, 21, 22):
        wrapper.plan(ints(0, 2), ints(1, 2), ints(length - PAGE), *HEADS, PAGE)
        q, key, value = (data.randn(1, heads, 64).half() for heads in (4, 2, 2))
        want = step(q, key, value, theirs, data.here(length))
        assert_same(compiled(q, key, value, ours, data.here(length)), want)
        assert_same(ours, theirs)


@pytest.mark.runs_nothing("appends to a cache")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++")
@pytest.mark.parametrize("name,step", [("append_paged_kv_cache", 4), ("append_paged_kv_cache_by_slot", 1)])
def test_inductor_appends_in_place(data, name, step):
    for call in ENTRIES[name].calls(data)[::step]:
        torch._dynamo.reset()
        ours, theirs = call.copies(), call.copies()
        got, want = torch.compile(call.run, fullgraph=True)(*ours), call.run(*theirs)
        for a, b in zip((*several(got), *ours), (*several(want), *theirs)):
            torch.testing.assert_close(a.float(), b.float(), rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.gpu
@traced
def test_reduce_overhead(entry):
    """Several calls with new values at new addresses: the first warms up, the second records, the others replay."""
    from targets import Target

    data = Data(Target("cuda:0", "auto"))
    for call in forms(entry, data):
        torch._dynamo.reset()
        compiled = torch.compile(call.run, fullgraph=True, mode="reduce-overhead")
        for turn in range(4):
            ours = [x * (1 + turn / 4) if x.is_floating_point() and x.element_size() > 1 else x for x in call.copies()]
            theirs = [x.clone() for x in ours]
            torch.compiler.cudagraph_mark_step_begin()
            got, want = several(compiled(*ours)), several(call.run(*theirs))
            for a, b in zip((*(x.clone() for x in got), *ours), (*want, *theirs)):
                torch.testing.assert_close(a.float(), b.float(), rtol=2e-3, atol=2e-3, equal_nan=True)
