"""What every public call promises: it is in the registry, its bits are the same in every run, under autocast, and in
threads. Gradients: test_autograd.py. Compilation: compile/. Copies: backends/test_copies.py."""

from __future__ import annotations

import concurrent.futures
import importlib
import inspect
import pkgutil
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from captures import disturbed
from compare import assert_bitwise
from registry import ENTRIES, Data, Entry, each
from targets import Target

import cutlass_kernels as ck

# Public names without an entry, and why.
NO_CALLS = {
    "Schedule": "is an argument of attention()",
    "mla.FlashMLASchedMeta": "holds data",
    "mla.MLAPlanMetadata": "holds data",
    "utils.FP4Tensor": "is always refused: test_engine_names.py",
    "nvfp4_quantize_append_paged_kv_cache": "is always refused: test_engine_names.py",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping": "is always refused: test_engine_names.py",
    "utils.get_device_sm_count": "takes a device, and no CPU: test_engine_names.py",
}
# Methods of wrappers that neither plan nor compute, or have another name in the same class.
NO_RUNS = {
    "begin_forward",
    "end_forward",
    "is_cuda_graph_enabled",
    "prewarm_paged_kv_stride_variant",
    "reset_workspace_buffer",
    "workspace_size",
}


def modules() -> Iterator[Any]:
    """The package and its public modules. What engines call is tested in tests/engines and by test_transformers*.py."""
    yield ck
    for found in pkgutil.iter_modules(ck.__path__):
        if not found.name.startswith("_") and found.name != "integrations":
            yield importlib.import_module(f"cutlass_kernels.{found.name}")


def public_names() -> dict[str, tuple[Any, str]]:
    """Where each public function and class is: in the package itself, if it is there, too."""
    names: dict[int, tuple[str, Any, str]] = {}
    for module in modules():
        listed = getattr(module, "__all__", ())
        for name, value in vars(module).items():
            ours = getattr(value, "__module__", None) or ""
            here = name in listed or ours == module.__name__ or (module is ck and ours.startswith("cutlass_kernels."))
            if name.startswith("_") or not callable(value) or not here:
                continue
            if not (inspect.isclass(value) and issubclass(value, Exception)):
                prefix = "" if module is ck else module.__name__.partition(".")[2] + "."
                names.setdefault(id(value), (prefix + name, module, name))
    return {full: (module, name) for full, module, name in names.values()}


def test_every_public_name_is_in_the_registry():
    names = public_names()
    assert not ENTRIES.keys() - names, "these are not public"
    missing = names.keys() - ENTRIES.keys() - NO_CALLS.keys()
    assert not missing, f"enter {sorted(missing)} into tests/registry, as tests/README.md says"
    assert not NO_CALLS.keys() - (names.keys() - ENTRIES.keys())


@each()
def test_entries_call_what_they_are_named_after(entry, monkeypatch):
    """And every method of a wrapper that plans or computes."""
    called: set[str] = set()

    def watch(owner: Any, name: str) -> str:
        original = getattr(owner, name)

        def watching(*args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, watching)
        return name

    module, name = public_names()[entry.name]
    value = getattr(module, name)
    if inspect.isclass(value):
        methods = [x for x in dir(value) if x[0] != "_" and callable(getattr(value, x)) and x not in NO_RUNS]
        wanted = {watch(value, x) for x in methods}
    else:
        wanted = {watch(module, name)}
    for call in entry.calls(Data(Target("cpu", "reference"))):
        call()
    assert called == wanted


def assert_same(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want):
        if isinstance(b, torch.Tensor):
            assert_bitwise(a, b)


# On a GPU also shapes of several tiles and KV splits, for each head dimension that all functions serve.
SHAPES = [pytest.param({}, id="small")] + [
    pytest.param({"heads": heads, "size": size}, id=f"{heads}-{size}", marks=pytest.mark.gpu)
    for heads in ((4, 4, 64), (16, 2, 128), (8, 4, 256))
    for size in (8, 32)
]


@pytest.mark.parametrize("shape", SHAPES)
@each(lambda entry: entry.attends)
def test_bits_of_attention_are_the_same_in_every_run(target, entry, shape):
    if target.is_reference and shape:
        pytest.skip("the reference has no tiles")
    check_bits(entry, target, **shape)


@each(lambda entry: not entry.attends)
def test_bits_are_the_same_in_every_run(target, entry):
    check_bits(entry, target)


def check_bits(entry: Entry, target: Target, **shape: Any) -> None:
    """The documentation promises it of all results. On a GPU also while another stream computes."""
    for call in entry.calls(Data(target, **shape)):
        want = call()
        assert_same(call(), want)
        assert_same(call(call.copies()), want)  # at other addresses
        if target.is_reference:
            continue
        stream, chance = torch.cuda.Stream(target.device), random.Random(0)
        for _ in range(20):
            assert_same(disturbed(call, stream, chance), want)
        torch.cuda.synchronize()


@each()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_changes_nothing(target, entry, dtype):
    kind = target.device.split(":")[0]
    for call in entry.calls(Data(target)):
        want = call()
        with torch.autocast(kind, dtype=dtype):
            got = call()
        assert_same(got, want)


@each(lambda entry: entry.threads)
def test_threads_get_their_own_results(target, entry):
    """Each plans and calls, with wrappers and tensors of its own."""
    want = [call() for call in entry.calls(Data(target))]

    def work(_: int) -> None:
        with torch.no_grad():
            for _ in range(5):
                for call, results in zip(entry.calls(Data(target)), want, strict=True):
                    assert_same(call(), results)

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
