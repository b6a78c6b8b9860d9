"""The table of attention()'s arguments: what follows from its rows."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from paths import ROOT

import cutlass_kernels as ck
from cutlass_kernels._core import call_table, native
from cutlass_kernels._core.call_table import INTERNAL, Call
from cutlass_kernels._core.fronts import front
from cutlass_kernels._graphs import operators

Q = torch.zeros(2, 4, 64)


def test_attention_has_the_rows_as_its_arguments():
    parameters = inspect.signature(ck.attention).parameters
    assert [*parameters] == [name for name in Call._fields if name not in INTERNAL]
    defaults = {name: x.default for name, x in parameters.items() if x.default is not x.empty}
    assert defaults == {name: x for name, x in Call._field_defaults.items() if name not in INTERNAL}


def test_the_documentation_explains_every_argument():
    assert ck.attention.__doc__ is not None
    said = ck.attention.__doc__.split("Args:")[1].split("Returns:")[0]
    names = [name for row in re.findall(r"^    ((?:\w+, )*\w+):", said, re.MULTILINE) for name in row.split(", ")]
    assert names == [name for name in Call._fields if name not in INTERNAL]


def test_packed_calls_have_the_defaults_of_the_rows():
    pack = call_table.packer("k v q sinks", lse_base=3)
    assert Call._make(pack("k", "v", "q", "sinks")) == Call("q", "k", "v", sinks="sinks", lse_base=3)
    for fields, constants in (("q nonsense", {}), ("q", {"nonsense": 1})):
        with pytest.raises(AssertionError, match="nonsense"):
            call_table.packer(fields, **constants)


def test_arguments_with_defaults_are_given_by_keyword():
    parameters = inspect.signature(ck.attention).parameters.values()
    assert {x.name for x in parameters if x.default is x.empty} == {"q", "k", "v"}
    assert all((x.kind is x.KEYWORD_ONLY) == (x.default is not x.empty) for x in parameters)
    for more in ((None,), (None, None)):
        with pytest.raises(TypeError, match=r"attention\(\) takes 3 positional arguments: pass the others by keyword"):
            ck.attention(Q, Q, Q, *more)
    with pytest.raises(TypeError, match="nonsense"):
        ck.attention(Q, Q, Q, nonsense=1)


class Foreign:
    query: torch.Tensor
    keys: torch.Tensor
    scale: float | None = None
    old_scale: float | None = None
    window_size: int = -1
    unused: bool = False


FIELDS = {"q": "query", "k": "keys", "v": "keys", "sm_scale": "scale/old_scale", "window": (str, "window_size")}


def test_a_front_packs_its_arguments_under_the_names_of_the_rows():
    @front(
        Foreign, "query keys window_size=3 * unused scale old_scale", FIELDS, {"both": "scale unused"}, {"causal": 1}
    )
    def function(call: Call, keys: torch.Tensor, both: Any) -> Any:
        """What it says."""
        return Call._make(call), keys, both

    assert str(inspect.signature(function)) == (
        "(query: 'torch.Tensor', keys: 'torch.Tensor', window_size: 'int' = 3, *, unused: 'bool' = False, "
        "scale: 'float | None' = None, old_scale: 'float | None' = None) -> 'Any'"
    )
    assert function.__doc__ == "What it says." and function.__name__ == "function"
    expected = Call("q", "k", "k", window="3", causal=1)
    assert function("q", "k") == (expected, "k", (None, False))
    assert function("q", "k", 5, old_scale=2) == (expected._replace(window="5", sm_scale=2), "k", (None, False))
    assert function("q", "k", scale=1, old_scale=2, unused=True) == (expected._replace(sm_scale=1), "k", (1, True))
    for word, order, both in (("k", "query scale", "scale"), ("nonsense", "query keys scale", "scale nonsense")):
        with pytest.raises(AssertionError, match=f"^{word} is neither"):
            front(Foreign, order, FIELDS, {"both": both})(lambda call, keys, both: None)


@pytest.mark.parametrize("q_descale", [None, 0.5, torch.ones(1)])
def test_an_operator_gets_the_call_back(q_descale):
    call = Call(Q, Q, Q, window=(3, -1), q_descale=q_descale, o_dtype=torch.float16, kv_shard=(2, 1, 1), lse_base=2.0)
    arguments = operators.Arguments(call_table.TYPES, left_out=("schedule",))
    given = arguments.given(call._asdict())
    assert len(given) == arguments.count
    assert all(a is b or a == b for a, b in zip(Call(**arguments.found(given)), call))


@pytest.mark.parametrize("form", ["attention", "attention_into", "attention_forward_only"])
def test_operators_say_what_they_write_to(form):
    """``_forward_only`` writes to copies, which it returns."""
    schema = getattr(torch.ops.cutlass_kernels, form).default._schema
    written = [x.name for x in schema.arguments if x.alias_info is not None and x.alias_info.is_write]
    assert written == (["out", "lse", "max_logits"] if form == "attention_into" else [])
    assert len(schema.returns) == (3 if form == "attention_forward_only" else 2)


def test_the_compiled_module_reads_the_rows_in_their_order():
    """The build makes an enumeration of the rows as this expression finds them (cmake/build_extension.cmake)."""
    text = (ROOT / "python" / "cutlass_kernels" / "_core" / "call_table.py").read_text()
    assert re.findall(r"\n    ([a-z0-9_]+): Annotated", text) == [*Call._fields]
    if native._C is not None:
        assert native._C.call_arguments.split() == [*Call._fields], "build the package again"


@pytest.mark.parametrize("options", [{}, {"window": (3, -1)}, {"kv_shard": (2, 1, 1)}], ids=str)
def test_calls_in_graphs_are_the_same_direct_calls(monkeypatch, options):
    """Through the operator, in which tuples become lists."""
    made = []
    monkeypatch.setattr(native, "attention", lambda *call: made.append(call))
    q, k = torch.randn(1, 2, 4, 64), torch.randn(1, 5, 2, 64)
    if "kv_shard" in options:
        options = {**options, "seqused_k": torch.tensor([10], dtype=torch.int32)}

    def call(q, k):
        return ck.attention(q, k, k, causal=True, **options)

    expected = call(q, k)
    (eager,) = made
    found = torch.compile(call, backend="eager", fullgraph=True)(q, k)
    assert torch.equal(found, expected)
    others = [*Call._fields].index("schedule")
    for a, b in zip(eager[3:others], made[1][3:others]):
        assert isinstance(a, torch.Tensor) or (a == b and not isinstance(b, list))
