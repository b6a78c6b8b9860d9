"""The engine examples without engines: their stand-ins, the bound on logits, profiles, workloads, the command line."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

import pytest
import torch
from commands import python
from compare import assert_close
from paths import ROOT
from plan_free_problems import Mask, Options, expect, keys
from problems import Batch, make_batch

import cutlass_kernels

sys.path.insert(0, str(ROOT / "examples"))  # whose package "engines" is tested

from engines.common import cli, forcing, models, report, shares, workloads
from engines.mini_sglang import _stand_ins, modules, sdpa_wrappers
from engines.nano_vllm import stand_ins

from cutlass_kernels import flash_attn

try:
    import transformers
except ImportError:
    transformers = None

needs_transformers = pytest.mark.skipif(transformers is None, reason="transformers is not installed")
SCALE = 0.125
FLASH_ATTN = {
    "ours": lambda: flash_attn,
    "sdpa": stand_ins.sdpa,
    "flashinfer": lambda: stand_ins.as_module(
        stand_ins.OverFlashInfer(cutlass_kernels).varlen, stand_ins.OverFlashInfer(cutlass_kernels).with_kvcache
    ),
}


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def check(batch: Batch, out: torch.Tensor) -> None:
    want, _, base = expect(batch, Mask(causal=True), Options())
    assert_close(out.reshape(want.shape), want, base.to(out.dtype))


# --- attention as the engines call it ---


@pytest.mark.parametrize("name", FLASH_ATTN)
@pytest.mark.parametrize("paged", [False, True])
def test_nano_vllms_prompts(name, paged):
    batch = make_batch([12, 1, 30], [40, 9, 300] if paged else [12, 1, 30])
    k, v, more = keys(batch, "table" if paged else "ragged", "NHD", 256, False)
    out = FLASH_ATTN[name]().flash_attn_varlen_func(
        batch.q,
        k.nan_to_num(),  # FlashInfer's and torch's kernels multiply unseen keys by 0
        v.nan_to_num(),
        max_seqlen_q=30,
        cu_seqlens_q=batch.qo_indptr("cpu"),
        max_seqlen_k=max(batch.kv_lens),
        cu_seqlens_k=batch.kv_indptr("cpu"),
        softmax_scale=SCALE,
        causal=True,
        block_table=more["page_table"] if paged else None,
    )
    check(batch, out)


@pytest.mark.parametrize("name", FLASH_ATTN)
def test_nano_vllms_decode_steps(name):
    """The last two requests pad a CUDA graph: they have no keys, and their pages are -1."""
    batch = make_batch([1] * 3, [40, 9, 300])
    k, v, more = keys(batch, "table", "NHD", 256, False)
    table = torch.full((5, more["page_table"].size(1)), -1, dtype=torch.int32)
    for b, length in enumerate(batch.kv_lens):
        table[b, : -(-length // 256)] = more["page_table"][b, : -(-length // 256)]
    q = torch.cat([batch.q, torch.randn(2, *batch.q.shape[1:], dtype=batch.q.dtype)])
    out = FLASH_ATTN[name]().flash_attn_with_kvcache(
        q.unsqueeze(1),
        k.nan_to_num(),
        v.nan_to_num(),
        cache_seqlens=ints(*batch.kv_lens, 0, 0),
        block_table=table,
        softmax_scale=SCALE,
        causal=True,
    )
    assert out.shape == (5, 1, *batch.q.shape[1:])
    check(batch, out[:3])


def test_default_device_and_dtype_of_the_caller_change_nothing():
    """nano-vllm captures its graphs with both set; "meta" stands for "cuda" here."""
    batch = make_batch([1] * 2, [40, 9])
    k, v, more = keys(batch, "table", "NHD", 256, False)
    default = torch.get_default_dtype()
    try:
        torch.set_default_device("meta")
        torch.set_default_dtype(torch.bfloat16)
        out = flash_attn.flash_attn_with_kvcache(
            batch.q.unsqueeze(1), k, v, cache_seqlens=more["seqused_k"], block_table=more["page_table"], causal=True
        )
        tokens = token_cache(batch)
        decoded = decode(cutlass_kernels, batch, tokens, graph=True)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(default)
    check(batch, out)
    check(batch, decoded)


def token_cache(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values in pages of one token, in random order, and where the tokens are."""
    slots = torch.randperm(len(batch.k) + 7, device="cpu")[: len(batch.k)].int()
    caches = [torch.zeros(len(batch.k) + 7, 1, *x.shape[1:], dtype=x.dtype, device="cpu") for x in (batch.k, batch.v)]
    for cache, x in zip(caches, (batch.k, batch.v)):
        cache[slots.long(), 0] = x
    return caches[0], caches[1], slots


def common_of(batch: Batch) -> dict[str, Any]:
    heads, size = batch.q.shape[1:]
    given = dict(num_qo_heads=heads, num_kv_heads=batch.k.size(1), page_size=1, pos_encoding_mode="NONE")
    given.update(q_data_type=batch.q.dtype, kv_data_type=batch.k.dtype, non_blocking=True)
    return given | {"seq_lens": torch.tensor(batch.kv_lens, dtype=torch.int32, device="cpu"), "size": size}


def decode(library: Any, batch: Batch, tokens: tuple[torch.Tensor, ...], graph: bool) -> torch.Tensor:
    """As mini-sglang's backend "fi" decodes, with or without CUDA graphs."""
    workspace = torch.empty(1 << 20, dtype=torch.uint8, device="cpu")
    requests, given = len(batch.kv_lens), common_of(batch)
    ones = torch.ones(requests, dtype=torch.int32, device="cpu")
    if graph:
        wrapper = library.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
            workspace,
            kv_layout="NHD",
            use_tensor_cores=True,
            indptr_buffer=torch.arange(requests + 1, dtype=torch.int32, device="cpu"),
            indices_buffer=torch.zeros(requests * 512, dtype=torch.int32, device="cpu"),
            last_page_len_buffer=ones.clone(),
        )
        assert isinstance(wrapper, library.BatchDecodeWithPagedKVCacheWrapper)
    else:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            workspace, use_tensor_cores=True, kv_layout="NHD", backend="auto"
        )
    wrapper._backend = "auto"
    wrapper._int_workspace_buffer = library.BatchPrefillWithPagedKVCacheWrapper(
        workspace, kv_layout="NHD", backend="auto"
    )._int_workspace_buffer
    size = given.pop("size")
    if graph:  # at the capture all requests are one token long
        first = torch.arange(requests + 1, dtype=torch.int32, device="cpu")
        once = given | {"seq_lens": ones}
        wrapper.plan(
            indptr=first, indices=first[:-1], last_page_len=ones, head_dim=size, data_type=batch.q.dtype, **once
        )
        wrapper.run(q=batch.q, paged_kv_cache=tokens[:2])
    begins = batch.kv_indptr("cpu")
    wrapper.plan(indptr=begins, indices=tokens[2], last_page_len=ones, head_dim=size, data_type=batch.q.dtype, **given)
    return wrapper.run(q=batch.q, paged_kv_cache=tokens[:2])


@pytest.mark.parametrize("library", [cutlass_kernels, sdpa_wrappers], ids=["ours", "sdpa"])
@pytest.mark.parametrize("graph", [False, True])
def test_mini_sglangs_decode_steps(library, graph, monkeypatch):
    monkeypatch.setattr(sdpa_wrappers.CUDAGraphBatchDecodeWithPagedKVCacheWrapper, "longest", 512)
    batch = make_batch([1] * 3, [40, 9, 300])
    check(batch, decode(library, batch, token_cache(batch), graph))


@pytest.mark.parametrize("library", [cutlass_kernels, sdpa_wrappers], ids=["ours", "sdpa"])
def test_mini_sglangs_prompts(library):
    batch = make_batch([12, 1, 30], [40, 1, 300])
    tokens, given = token_cache(batch), common_of(batch)
    wrapper = library.BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(1 << 20, dtype=torch.uint8), kv_layout="NHD", backend="auto"
    )
    wrapper.plan(
        qo_indptr=batch.qo_indptr("cpu"),
        paged_kv_indptr=batch.kv_indptr("cpu"),
        paged_kv_indices=tokens[2],
        paged_kv_last_page_len=torch.ones(3, dtype=torch.int32),
        head_dim_qk=given.pop("size"),
        causal=True,
        **given,
    )
    check(batch, wrapper.run(q=batch.q, paged_kv_cache=tokens[:2]))


# --- mini-sglang's other functions ---


def close(out: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(out.double(), want, rtol=1e-2, atol=1e-2)


def test_norms_and_activations():
    x, residual = torch.randn(2, 5, 64).bfloat16()
    weight = torch.randn(64).bfloat16()

    def norm(x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    close(_stand_ins.rmsnorm(x, weight, 1e-5), norm(x.double()))
    heads = x.clone().view(5, 2, 32)
    _stand_ins.rmsnorm(heads, torch.ones(32).bfloat16(), 1e-5, out=heads)
    close(heads[0, 1], x[0, 32:].double() / (x[0, 32:].double().square().mean() + 1e-5).sqrt())
    total = x.double() + residual.double()
    added, kept = x.clone(), residual.clone()
    assert _stand_ins.fused_add_rmsnorm(added, kept, weight, 1e-5) is None
    close(added, norm(total))
    close(kept, total)
    gate, up = x.double().chunk(2, -1)
    close(_stand_ins.silu_and_mul(x), gate * gate.sigmoid() * up)
    close(_stand_ins.gelu_and_mul(x, out=None), gate * 0.5 * (1 + torch.erf(gate / 2**0.5)) * up)


def test_rope_in_place_on_slices():
    rows, positions = torch.randn(3, 4 * 8).bfloat16(), ints(5, 0, 9)
    angles = torch.arange(10)[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])
    cache = torch.cat([angles.cos(), angles.sin()], -1)
    q, k, v = (x.clone().double() for x in rows.split([16, 8, 8], -1))
    parts = rows.split([16, 8, 8], -1)
    _stand_ins.apply_rope_with_cos_sin_cache_inplace(
        positions=positions, query=parts[0], key=parts[1], head_size=8, cos_sin_cache=cache
    )
    turn = torch.polar(torch.ones(()).double(), angles[positions.long()].double())[:, None]
    for x, out in ((q, parts[0]), (k, parts[1])):
        halves = x.view(3, -1, 2, 4)
        turned = torch.complex(halves[:, :, 0], halves[:, :, 1]) * turn
        close(out, torch.stack([turned.real, turned.imag], 2).flatten(1))
    assert torch.equal(parts[2].double(), v)
    with pytest.raises(NotImplementedError, match="is_neox"):
        _stand_ins.apply_rope_with_cos_sin_cache_inplace(positions, parts[0], parts[1], 8, cache, is_neox=False)


def test_samples():
    torch.manual_seed(0)
    probs = _stand_ins.softmax(torch.tensor([[0.0, 1.0, 2.0, 3.0]]).log(), torch.ones(1), enable_pdl=False)
    torch.testing.assert_close(probs, torch.tensor([[0.0, 1 / 6, 2 / 6, 3 / 6]]))
    many = probs.expand(6000, 4)
    counts = _stand_ins.sampling_from_probs(many).bincount(minlength=4)
    assert counts[0] == 0 and (counts[1:] - torch.tensor([1000, 2000, 3000])).abs().max() < 200
    two = torch.full((6000,), 2, dtype=torch.int32)
    assert set(_stand_ins.top_k_sampling_from_probs(many, two).tolist()) == {2, 3}
    assert set(_stand_ins.top_p_sampling_from_probs(many, torch.full((6000,), 0.6)).tolist()) == {2, 3}
    assert set(_stand_ins.top_p_sampling_from_probs(many, 0.5).tolist()) == {3}
    # Of the two most probable ones, the first has 0.6 of the rest.
    assert set(_stand_ins.top_k_top_p_sampling_from_probs(many, 2, 0.55).tolist()) == {3}
    assert _stand_ins.sampling_from_probs(probs).dtype == torch.int32


def test_kernels_of_minisgl():
    caches = torch.zeros(2, 6, 2, 4)
    k, v = torch.randn(3, 24).split([8, 16], -1)[0], torch.randn(3, 8)
    _stand_ins.store_cache(caches[0], caches[1], ints(4, 0, 2), k, v)
    assert torch.equal(caches[0][[4, 0, 2]].flatten(1), k) and torch.equal(caches[1][[4, 0, 2]].flatten(1), v)
    assert caches[:, [1, 3, 5]].abs().max() == 0
    weights = torch.randn(5, 8)
    assert torch.equal(_stand_ins.indexing(weights, ints(4, 0)), weights[[4, 0]])
    split = _stand_ins.indexing(weights, ints(9, 12, 2), vocab_range=(8, 5))
    assert torch.equal(split, torch.stack([weights[1], weights[4], torch.zeros(8)]))
    assert _stand_ins.fast_compare_key(ints(1, 2, 3), ints(1, 2, 4, 5)) == 2
    assert (
        _stand_ins.fast_compare_key(ints(1, 2), ints(1, 2, 4)) == 2
        and _stand_ins.fast_compare_key(ints(), ints(1)) == 0
    )


@pytest.fixture
def no_modules(monkeypatch):
    """What modules.register() puts into sys.modules is gone afterwards."""
    for name in ("flashinfer", "flashinfer.sampling", "sgl_kernel", "sgl_kernel.flash_attn"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name))  # to be restored
        del sys.modules[name]


def test_modules(no_modules):
    if importlib.util.find_spec("flashinfer") is not None:
        pytest.skip("flashinfer is installed")
    with pytest.raises(ModuleNotFoundError, match="--helpers torch"):
        modules.register("flashinfer", "auto", 64)
    used = modules.register("ours", "auto", 64)
    assert used == {"wrappers": "cutlass_kernels", "norm, rope, activation, sampling": "torch"}
    found = importlib.import_module("flashinfer")
    assert found.BatchDecodeWithPagedKVCacheWrapper is cutlass_kernels.BatchDecodeWithPagedKVCacheWrapper
    assert importlib.import_module("flashinfer.sampling").softmax is _stand_ins.softmax
    assert importlib.import_module("sgl_kernel.flash_attn") is flash_attn


@pytest.mark.parametrize("attention, helpers", [("flashinfer", "torch"), ("ours", "flashinfer"), ("flashinfer",) * 2])
def test_flashinfer_is_imported_late(no_modules, monkeypatch, tmp_path, attention, helpers):
    """Its import initialises CUDA, before which the engine wants to choose its device."""
    package = tmp_path / "flashinfer"
    package.mkdir()
    wrappers = "".join(f"class {name}: pass\n" for name in modules.WRAPPERS)
    (package / "__init__.py").write_text(f"from .sampling import softmax\nrmsnorm = 'rmsnorm'\n{wrappers}")
    (package / "sampling.py").write_text("softmax = 'softmax'")
    monkeypatch.syspath_prepend(tmp_path)
    modules._package.cache_clear()
    modules.register(attention, helpers, 64)
    found = importlib.import_module("flashinfer")
    assert modules._package.cache_info().currsize == 0
    names = importlib.import_module("cutlass_kernels") if attention == "ours" else modules._package()
    assert all(getattr(found, name) is getattr(names, name) for name in modules.WRAPPERS)
    theirs = helpers == "flashinfer"
    assert (found.rmsnorm == "rmsnorm") == theirs
    assert (importlib.import_module("flashinfer.sampling").softmax == "softmax") == theirs
    assert importlib.import_module("flashinfer") is found
    modules._package.cache_clear()


# --- the bound on logits ---


def test_verdict():
    def distances(engine: float, control: float = 100.0) -> dict[str, dict[str, forcing.Distance]]:
        found = {"engine": engine, "baseline": 1.0, "control": control}
        one = {name: forcing.Distance(error**2, error) for name, error in found.items()}
        return {"prefill": one, "decode": one}

    sizes, counts = dict.fromkeys(forcing.KINDS, (1.0, 1.0)), {"prefill": 1, "decode": 1}
    good = forcing.verdict(distances(1.4), counts, sizes, 1)
    assert good["ok"] and good["decode"]["ratio"] == pytest.approx(1.4)
    assert not forcing.verdict(distances(1.6), counts, sizes, 1)["ok"]
    assert not forcing.verdict(distances(float("inf")), counts, sizes, 1)["ok"]
    assert not forcing.verdict(distances(1.0, control=1.2), counts, sizes, 1)["ok"]
    assert not forcing.verdict(distances(1.0), {"prefill": 0, "decode": 1}, sizes, 1)["ok"]


def test_distance():
    distance = forcing.Distance()
    distance.add(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 2.0]))
    assert (distance.squares, distance.largest) == (4.0, 2.0)
    distance.add(torch.tensor([float("nan")]), torch.tensor([1.0]))
    assert distance.squares == float("inf")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    models.write_model(directory, models.shape_of("tiny"), "cpu")
    return directory


@needs_transformers
def test_model_directory(tiny):
    config = transformers.AutoConfig.from_pretrained(tiny)
    assert config.architectures == ["Qwen3ForCausalLM"] and config.dtype == torch.bfloat16
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    assert tokenizer.encode("t5 t7") == [5, 7] and tokenizer.eos_token_id == 1
    assert (tiny / "model.safetensors").exists()


@needs_transformers
@pytest.mark.parametrize("preset", [name for name in models.PRESETS if name != "tiny"])
def test_families(preset, tmp_path):
    shape = models.shape_of(preset)
    small = models.Shape(shape.family, 64, 64, 2, 1, 1, 128, head_dim=32, tied=shape.tied)
    models.write_model(tmp_path, small, "cpu")
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert config.model_type == shape.family and getattr(config, "sliding_window", None) is None


@needs_transformers
def test_logits_check(tiny):
    """A transformers model in bfloat16 for an engine; then with one page of 16 keys hidden."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16, attn_implementation="eager")
    tokens = torch.randint(0, 1024, (300,)).tolist()
    for hide, fine in ((None, True), (forcing.HIDDEN_KEYS, False)):
        recording = forcing.Recording(tokens={0: tokens})
        recording.saw_prompt(0, 256)
        for kind, position in (("prefill", 199), *(("decode", i) for i in range(200, 300, 9))):
            recording.add([(0, position)], kind, forcing.logits_at(model, tokens, [position], hide))
        recording.saw_prompt(0, 256)  # not its first step
        assert dict(recording.counts) == {"prompts with a cached prefix": 1, "cached tokens": 256}
        found = forcing.judge(str(tiny), recording, "cpu")
        assert found["ok"] == fine and found["decode"]["rows"] == 12 and found["decode"]["control_ok"], found


# --- profiles, workloads, reports ---


def test_shares():
    def event(name: str, ts: float, dur: float, cat: str = "kernel") -> dict[str, Any]:
        return {"name": name, "ts": ts, "dur": dur, "cat": cat}

    trace = {
        "traceEvents": [
            event("void cutlass_kernels::fa2::kernel<1>", 10, 20),
            event("gemm", 25, 15),  # overlaps by 5
            event("Memcpy HtoD", 60, 10, "gpu_memcpy"),
            event("step", 0, 100, "gpu_user_annotation"),
            {"ph": "M", "name": "process_name"},
        ]
    }
    found = shares.shares(trace, shares.MARKS["ours"])
    assert (found["kernels_us"], found["attention_us"]) == (45, 20)
    assert found["share"] == pytest.approx(20 / 45) and found["busy"] == pytest.approx(40 / 60)
    assert [entry["us"] for entry in found["top"]] == [20, 15, 10]
    assert shares.shares({"traceEvents": []}, ("x",))["share"] is None


def test_a_profile_of_a_cpu_is_empty():
    found = shares.profiled(lambda: int(torch.ones(2).sum()), ("x",))
    assert (found["steps"] == 2 and found["kernels_us"] == 0.0) or torch.cuda.is_available()


def test_workloads():
    requests = workloads.check_requests(1000)
    assert requests == workloads.check_requests(1000)
    lengths = [len(request.prompt) for request in requests]
    assert max(lengths) > 2 * workloads.CHUNK and min(lengths) == 2 and 256 in lengths
    assert requests[0].prompt[:600] == requests[1].prompt[:600] != requests[4].prompt[:600]
    assert all(n + request.new_tokens < workloads.LONGEST for n, request in zip(lengths, requests))
    answers = [[7] * request.new_tokens for request in requests]
    turns = workloads.follow_ups(requests, answers, 1000)
    assert all(len(turn.prompt) > 256 and 7 in turn.prompt for turn in turns)
    bench = workloads.bench_requests(256, 151936)
    sizes = [len(r.prompt) for r in bench] + [r.new_tokens for r in bench]
    assert len(bench) == 256 and 100 <= min(sizes) < 120 and 1000 < max(sizes) <= 1024


def test_report():
    of = dict(rows=3, logits_rms=0.2, rms=2e-3, baseline_rms=2e-3, control_rms=3e-2, ratio=1.0, max=1e-2)
    of.update(baseline_max=1e-2, ok=True, control_ok=True)
    logits = {"ok": True, "prefill": of, "decode": of | {"ok": False}}
    window = dict(steps=2, kernels_us=4000.0, attention_us=1000.0, share=0.25, busy=0.9)
    bench = dict(sequences=4, seconds=2.0, prompt_tokens=100, new_tokens=5000, tokens_per_second=2500.0)
    runs = {
        "ours": {
            "check": {"logits": logits, "counts": {"chunks": 3}, "missing": ["graph replays"]},
            "speed": {"bench": bench, "profile": {"prefill": window, "decode": window | {"share": None}}},
        },
        "sdpa": {"speed": {"error": "RuntimeError: no"}},
    }
    text = report.report({"runs": runs})
    for part in ("TOO FAR", "3 chunks", "NOT COVERED: graph replays", "2,500", "25.0%", "sdpa, speed: FAILED"):
        assert part in text
    assert text.count("prefill") == 2
    profile = {"ours": {"speed": {"profile": {"decode": window}}}}
    assert "Throughput" not in report.report({"runs": profile}) and "25.0%" in report.report({"runs": profile})


# --- the command line ---


def test_arguments(capsys):
    parser = cli.make_parser("text", ["sdpa"], cli.presets_of(["qwen3"]))
    args = parser.parse_args(["--engine", "x", "--steps", "check,bench", "--against", "sdpa"])
    assert args.steps == ["check", "bench"] and args.against == ["sdpa"] and args.backend == "auto"
    for wrong in (["--steps", "chess"], ["--sequences", "0"], ["--model", "llama-8b"], ["--against", "magic"]):
        with pytest.raises(SystemExit):
            parser.parse_args(["--engine", "x", *wrong])
    assert "steps are check, bench, profile" in capsys.readouterr().err


def test_a_missing_engine_and_a_step_that_fails(tmp_path, monkeypatch, capsys):
    parser = cli.make_parser("text", [], ["tiny"])
    monkeypatch.setattr(sys, "argv", ["run.py", "--engine", str(tmp_path / "none")])
    with pytest.raises(SystemExit):
        cli.run(parser, {}, None, "run.py")
    assert "fetch the engine" in capsys.readouterr().err

    def fails(args: argparse.Namespace, directory: Any) -> dict[str, Any]:
        raise RuntimeError("no such luck")

    result = tmp_path / "result.json"
    child = ["--engine", "x", "--model", "tiny", "--child", "check:sdpa", "--result", str(result)]
    monkeypatch.setattr(sys, "argv", ["run.py", *child])
    assert cli.run(parser, {"check": fails}, None, "run.py") == 1
    assert "RuntimeError: no such luck" in result.read_text()


@pytest.mark.parametrize("engine", ["nano_vllm", "mini_sglang", "hf_transformers"])
def test_help(engine):
    """The scripts start from anywhere."""
    done = python(ROOT / "examples" / "engines" / engine / "run.py", "--help")
    assert "--against" in done.stdout and "--profile-length" in done.stdout
