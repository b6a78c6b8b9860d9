"""FlashMLA's tests, which are scripts, as cases of pytest (see README.md beside it).

Each script makes a list of cases and calls its function for each of them. Here the script runs up to the first call:
then its list and the settings of torch that it has made are known. The measurements within cases are left out: they ask
a profiler for FlashMLA's kernels.

Without a GPU the scripts run on the CPU, where PyTorch computes: that tests this file and the names, not the kernels.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from cutlass_kernels import PerformanceWarning
from cutlass_kernels._compute import selection

FOLDER = Path(os.environ["CK_CONFORMANCE_CHECKOUT"]) / "tests"
LARGE = 1 << 30  # elements of keys that a reference gathers, from which on cases do not run side by side


class _Reached(Exception):
    """The script calls its function for the first case."""


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    """For the import of scripts, modules that may be missing: only their measurements and tables use these."""
    missing = [name for name in ("triton", "rich") if importlib.util.find_spec(name) is None]
    missing += [f"rich.{name}" for name in ("console", "table") if "rich" in missing]
    for name in missing:
        sys.modules[name] = ModuleType(name)
        sys.modules[name].jit = lambda function: function  # type: ignore[attr-defined]  # of Triton
    yield
    for name in missing:  # torch looks for Triton
        del sys.modules[name]


@contextlib.contextmanager
def _device() -> Iterator[None]:
    """The GPU, or the CPU in its place."""
    with contextlib.ExitStack() as stack:
        if not torch.cuda.is_available():
            stands_in: dict[str, Any] = dict(set_device=lambda device: None, get_device_capability=lambda: (9, 0))
            stands_in["synchronize"] = lambda: None
            for name, function in stands_in.items():
                stack.enter_context(mock.patch.object(torch.cuda, name, function))
            stack.enter_context(mock.patch.object(torch.Tensor, "cuda", lambda x: x))
        yield


@dataclasses.dataclass
class _Settings:
    """What scripts set in torch for all of their cases."""

    dtype: torch.dtype
    device: torch.device
    precision: str

    @classmethod
    def now(cls) -> _Settings:
        return cls(torch.get_default_dtype(), torch.get_default_device(), torch.get_float32_matmul_precision())

    def apply(self) -> None:
        torch.set_default_dtype(self.dtype)
        torch.set_default_device(self.device if torch.cuda.is_available() else "cpu")
        torch.set_float32_matmul_precision(self.precision)


class Script:
    """A script, its function, and the cases that it calls it with if it is started with ``arguments``."""

    def __init__(self, name: str, function: str, *arguments: str) -> None:
        path = FOLDER / f"test_flash_mla_{name}.py"
        spec = importlib.util.spec_from_file_location(f"{name}{''.join(arguments)}".replace("-", "_"), path)
        assert spec is not None and spec.loader is not None
        self.module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = self.module  # where dataclasses look
        with _stand_ins():
            spec.loader.exec_module(self.module)
        self.function = getattr(self.module, function)
        self.cases: list[Any] = []
        threads, before = torch.get_num_threads(), _Settings.now()
        setattr(self.module, function, self._list)
        started = ast.parse(path.read_text()).body[-1]
        assert isinstance(started, ast.If)  # __name__ == "__main__"
        code = compile(ast.Module(started.body, []), str(path), "exec")
        with _device(), mock.patch.object(sys, "argv", [str(path), *arguments]), contextlib.suppress(_Reached):
            exec(code, vars(self.module))
        self.settings = _Settings.now()
        before.apply()
        torch.set_num_threads(threads)
        setattr(self.module, function, self.function)

    def _list(self, case: Any) -> None:
        for number, each in enumerate(sys._getframe(1).f_locals["testcases"]):
            seed = number if each.seed == -1 else each.seed  # as the script numbers them
            untimed = dict(num_runs=0) if hasattr(each, "num_runs") else dict(test_performance=False)
            self.cases.append(dataclasses.replace(each, seed=seed, **untimed))
        raise _Reached

    def parameters(self, chosen: Callable[[Any], bool] = lambda case: True) -> list[Any]:
        """For ``parametrize``: large cases all in one process."""
        large = pytest.mark.xdist_group("large")
        return [
            pytest.param(self, case, id=_words(case), marks=[large] if _gathered(case) > LARGE else [])
            for case in self.cases
            if chosen(case)
        ]

    def run(self, case: Any) -> None:
        """What no kernel serves skips, as what this library refuses does."""
        before = _Settings.now()
        selection._warned.clear()
        try:
            with _device(), warnings.catch_warnings():
                warnings.simplefilter("error", PerformanceWarning)
                self.settings.apply()
                result = self.function(copy.deepcopy(case))
        except PerformanceWarning as warning:
            pytest.skip(f"no kernel: {warning}")
        finally:
            before.apply()
        assert getattr(result, "is_correct", result) in (None, True)


def _words(case: Any) -> str:
    """A case in a name: what is set, as s_q1-topk128."""
    values = vars(case) | vars(getattr(case, "decode", None) or case)
    values["unchecked"] = not values.pop("check_correctness", True)
    told = {key: value for key, value in values.items() if key != "decode" and value not in (None, False)}
    return "-".join(key if value is True else f"{key}{value}" for key, value in told.items())


def _gathered(case: Any) -> int:
    """Elements of keys that the script's reference gathers at a time."""
    decode = getattr(case, "decode", None)
    if not hasattr(case, "topk"):
        return 0
    keys = case.topk + ((decode and decode.extra_topk) or 0)
    return int(case.s_q * (decode.b if decode else 1) * keys * case.d_qk) if case.check_correctness else 0


PREFILL = Script("sparse_prefill", "run_test")
DECODING = Script("sparse_decoding", "test_flash_mla")
DENSE = [Script("dense_decoding", "test_flash_mla", "--dtype", dtype) for dtype in ("bf16", "fp16")]


@pytest.mark.parametrize(("script", "case"), PREFILL.parameters())
def test_sparse_prefill(script: Script, case: Any) -> None:
    script.run(case)


@pytest.mark.parametrize(("script", "case"), DECODING.parameters())
def test_sparse_decoding(script: Script, case: Any) -> None:
    script.run(case)


def _of_16_bits(p: Any, t: Any, *metadata: Any) -> Any:
    """lib.run_flash_mla_decode() over the numbers that the quantized cache holds."""
    given = (t.q, t.kv_scope.blocked_k, None, None, p.d_v, *metadata, t.sm_scale)
    scope = dict(indices=t.kv_scope.indices_in_kvcache, topk_length=t.kv_scope.topk_length)
    return DECODING.module.flash_mla.flash_mla_with_kvcache(*given, **scope, attn_sink=t.attn_sink)


@pytest.mark.parametrize(("script", "case"), DECODING.parameters(lambda case: case.decode.extra_topk is None))
def test_sparse_decoding_of_16_bits(script: Script, case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script.module.lib, "run_flash_mla_decode", _of_16_bits)
    script.run(case)


@pytest.mark.parametrize(("script", "case"), DENSE[0].parameters())
def test_dense_decoding(script: Script, case: Any) -> None:
    script.run(case)


@pytest.mark.parametrize(("script", "case"), DENSE[1].parameters())
def test_dense_decoding_in_fp16(script: Script, case: Any) -> None:
    script.run(case)
