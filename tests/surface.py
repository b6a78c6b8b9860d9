"""The public surface as text, for a comparison of two checkouts: names, signatures, documentation, and refusals.

    (cd ../old && python tests/surface.py) > old.txt; python tests/surface.py > new.txt; diff old.txt new.txt

Of calls it has what they return or raise: those of the registry with a tensor replaced, and those of
api/test_senseless_arguments.py with an argument replaced. Runs on the CPU, 10 s.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "api")]

import torch  # noqa: E402
from registry import ENTRIES, Data  # noqa: E402
from small_calls import Calls  # noqa: E402
from targets import TARGETS  # noqa: E402
from test_senseless_arguments import VALUES, cascades, functions, shared_prefixes, wrappers  # noqa: E402
from test_wrong_kinds import others  # noqa: E402

import cutlass_kernels as ck  # noqa: E402

MODULES = [
    "cascade",
    "decode",
    "flash_attn",
    "flash_mla",
    "fmha_v2",
    "mla",
    "page",
    "pod",
    "prefill",
    "quantization",
    "rope",
    "sparse",
    "utils",
]
ADDRESS = re.compile(r"0x[0-9a-f]+|at address \d+")


def text_of(x: Any) -> str:
    return ADDRESS.sub("0x", re.sub(r"\s+", " ", str(x))).strip()


def signature(x: Any) -> str:
    try:
        return text_of(inspect.signature(x))
    except (TypeError, ValueError):
        return ""


def members(name: str, x: Any) -> Iterator[str]:
    if inspect.isclass(x):
        yield f"{name}: class{signature(x)} | {text_of(x.__doc__)}"
        for key in sorted(set(dir(x)) - set(dir(object)) - {"__dict__", "__weakref__", "__module__"}):
            if key.startswith("_") and not key.startswith("__"):
                continue
            member = inspect.getattr_static(x, key)
            doc = text_of(getattr(member, "__doc__", "")) if not key.startswith("__") else ""
            yield f"{name}.{key}: {type(member).__name__}{signature(getattr(x, key))} | {doc}"
    elif callable(x):
        yield f"{name}: function{signature(x)} | {text_of(x.__doc__)}"
    elif not isinstance(x, ModuleType):
        yield f"{name}: {text_of(repr(x))}"


def names() -> Iterator[str]:
    for module in (ck, *(importlib.import_module(f"cutlass_kernels.{name}") for name in MODULES)):
        public = getattr(module, "__all__", None) or [x for x in vars(module) if not x.startswith("_")]
        for name in sorted(public):
            x = getattr(module, name)
            home = getattr(x, "__module__", "cutlass_kernels").partition(".")[0]
            if isinstance(x, ModuleType) or home != "cutlass_kernels":
                continue
            yield from members(f"{module.__name__}.{name}", x)


def outcome(call: Callable[[], Any]) -> str:
    try:
        with warnings.catch_warnings(record=True) as said, torch.no_grad():
            warnings.simplefilter("always")
            result = call()
    except Exception as error:
        return f"{type(error).__name__}: {text_of(error)}"
    tensors = result if isinstance(result, tuple) else (result,)
    kinds = [f"{x.dtype} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__ for x in tensors]
    return ", ".join(kinds) + "".join(f" | {w.category.__name__}: {text_of(w.message)}" for w in said)


def refusals() -> Iterator[str]:
    target = TARGETS[0].values[0]
    for name, entry in ENTRIES.items():
        if name.startswith("distributed"):
            continue
        for number, call in enumerate(entry.calls(Data(target))):
            yield f"{name} {number}: {outcome(lambda: call.run(*call.copies()))}"
            for at, x in enumerate(call.tensors):
                types = [("int32", x.to(torch.int32)), ("double", x.double())]
                for kind, other in [*others(x), *types, ("shorter", x[:-1]), ("narrower", x[..., :-1])]:
                    tensors = [*call.copies()]
                    tensors[at] = other
                    yield f"{name} {number} {at} {kind}: {outcome(lambda: call.run(*tensors))}"
    for attempts in (functions, wrappers, cascades, shared_prefixes):
        for name, function, call in attempts(Calls(target)):
            for parameter, facts in inspect.signature(function).parameters.items():
                if facts.kind in (facts.VAR_KEYWORD, facts.VAR_POSITIONAL):
                    continue
                for value in [*VALUES, True, 2, float("nan"), torch.float16, "HND"]:
                    said = outcome(lambda: call(**{parameter: value}))
                    yield f"{name}({parameter}={text_of(value)}): {said}"


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for line in [*names(), *refusals()]:
        print(line)
