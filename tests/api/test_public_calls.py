"""What every public call promises: it is in the registry, its bits are the same in every run, under autocast, and in
threads. Gradients: test_autograd.py. Compilation: compile/. Copies: backends/test_copies.py."""

from __future__ import annotations

import concurrent.futures
import importlib
import inspect
import math
import pkgutil
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from captures import disturbed
from compare import assert_bitwise
from problems import make_batch
from registry import ENTRIES, PAGE, Data, Entry, each, several
from targets import Target

import cutlass_kernels as ck
from cutlass_kernels import flash_attn

# Public names without an entry, and why.
NO_CALLS = {
    "Schedule": "is an argument of attention()",
    "flash_mla.FlashMLASchedMeta": "holds data",
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


@pytest.mark.parametrize("shape", [x.values[0] for x in SHAPES[1::2]], ids=[x.id for x in SHAPES[1::2]])
@each(lambda entry: entry.attends)
def test_entries_call_with_shapes_of_gpus(entry, shape):
    """That they can be called: where no GPU is, the test above has no such shapes."""
    for call in entry.calls(Data(Target("cpu", "reference"), **shape)):
        call()


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


# --- torch.autocast, which rounds products and refuses to join other types ---

DTYPES = [torch.float16, torch.bfloat16]


@each()
@pytest.mark.parametrize("dtype", DTYPES)
def test_autocast_changes_nothing(target, entry, dtype):
    kind = target.device.split(":")[0]
    for call in entry.calls(Data(target)):
        want = call()
        with torch.autocast(kind, dtype=dtype):
            got = call()
        assert_same(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_autocast_changes_nothing_of_joined_types(target, dtype):
    """Values in the logits, and rotary tables in float32."""
    x = Data(target)
    q, k, v = (y[None] for y in x.qkv)
    qv, angles = x.randn(1, 5, 4, 64).half(), x.randn(20, 16)
    turns = dict(cache_seqlens=x.here(3), rotary_cos=angles.cos(), rotary_sin=angles.sin(), causal=True)

    def results() -> list[torch.Tensor]:
        caches = torch.zeros_like(k), torch.zeros_like(v)
        rotated = flash_attn.flash_attn_with_kvcache(q, *caches, k[:, :5], v[:, :5], **turns)
        return [flash_attn.flash_attn_func(q, k, v, qv=qv), rotated, *caches]

    want = results()
    with torch.autocast(target.device.split(":")[0], dtype):
        for a, b in zip(results(), want, strict=True):
            assert_bitwise(a, b)


@pytest.mark.runs_nothing("some merge or rotate")
@pytest.mark.parametrize("name", ["merge_state", "merge_states", "attention", "apply_rope_with_cos_sin_cache"])
def test_autocast_changes_nothing_of_compiled_calls(target, name):
    call = ENTRIES[name].calls(Data(target))[0]
    torch._dynamo.reset()
    compiled, want = torch.compile(call.run, fullgraph=True, backend="aot_eager"), several(call.run(*call.copies()))
    for dtype in DTYPES:
        with torch.autocast(target.device.split(":")[0], dtype):
            for a, b in zip(several(compiled(*call.copies())), want, strict=True):
                torch.testing.assert_close(a, b)
    torch._dynamo.reset()


def test_large_queries_are_not_rounded(target):
    """What autocast's bfloat16 products lose of queries 8 times as large as usual."""
    batch = make_batch([33], [257], 4, 2, 64, device=target.device)
    with torch.autocast(target.device.split(":")[0], torch.bfloat16):
        got = ck.attention(8 * batch.q[None], batch.k[None], batch.v[None], backend=target.backend)[0]
    k, v = (x.double().repeat_interleave(2, 1) for x in (batch.k, batch.v))
    logits = torch.einsum("nhd,mhd->hnm", 8 * batch.q.double(), k) / math.sqrt(64)
    want = torch.einsum("hnm,mhd->nhd", logits.softmax(-1), v)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=4e-3)


@pytest.mark.runs_nothing("merges")
def test_autocast_stays_on_around_a_call(target):
    kind, state = target.device.split(":")[0], Data(target).state
    x = torch.ones(PAGE, PAGE, device=target.device)
    with torch.autocast(kind, torch.bfloat16):
        ck.merge_state(*state, *state)
        assert torch.is_autocast_enabled(kind) and (x @ x).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled(kind)


# --- threads ---


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
