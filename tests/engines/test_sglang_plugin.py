"""The plug-in for SGLang on SGLang's own classes, without a GPU: the reference computes, the oracle judges."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
from types import SimpleNamespace

import oracle
import pytest
import torch

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed; tools/test_plugins.py installs and tests it", allow_module_level=True)

import sglang.srt.plugins as sglang_plugins
from contracts import assert_same_parameters, assert_takes, overridden
from distribution import write_distribution
from engine_steps import ALL, DIM, HEADS, KV_HEADS, OPTIONS, SINKS, Expected
from sglang.srt.arg_groups import choices
from sglang.srt.layers.attention import attention_registry
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.triton_backend import TritonMultiStepDraftBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.speculative import draft_utils
from sglang_steps import CONTEXT, Steps, chain, publish, random_tree

import cutlass_kernels.integrations.sglang as plugin
from cutlass_kernels.integrations import _engines
from cutlass_kernels.integrations.sglang.backend import CutlassKernelsBackend
from cutlass_kernels.integrations.sglang.drafts import MultiStepDraftBackend, with_our_row
from cutlass_kernels.integrations.sglang.metadata import pack_trees, tree_bytes

# Prompts, a chunk beside new prompts, a step of decodes and a prompt, and decodes.
STEPS = [{1: 37, 2: 5}, {3: 20, 2: 3}, {3: 1, 1: 1, 4: 9}, {1: 1, 2: 1, 3: 1}]


GRAPHS = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])


@pytest.fixture(autouse=True)
def published(monkeypatch):
    publish(monkeypatch)


@pytest.fixture
def clean_registry(monkeypatch):
    monkeypatch.setattr(attention_registry, "ATTENTION_BACKENDS", dict(attention_registry.ATTENTION_BACKENDS))
    monkeypatch.setattr(sglang_plugins, "_plugins_loaded", False)
    factory = draft_utils.DraftBackendFactory
    monkeypatch.setattr(factory, "_create_backend", factory._create_backend)
    lists = [
        choices.ATTENTION_BACKEND_CHOICES,
        choices.DRAFT_ATTENTION_BACKEND_CHOICES,
        choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
    ]
    yield lists
    HookRegistry.reset()
    for held in lists:
        while plugin.NAME in held:
            held.remove(plugin.NAME)


# --- registration and choice ---


def test_the_installed_release_is_served():
    assert _engines.is_served("sglang", importlib.metadata.version("sglang"))


def test_sglang_loads_the_entry_point(clean_registry, monkeypatch, tmp_path):
    write_distribution(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("SGLANG_PLUGINS", "cutlass_kernels")
    sglang_plugins.load_plugins()
    plugin.register()  # a second time changes nothing
    assert [held.count(plugin.NAME) for held in clean_registry] == [1, 1, 1, 1]
    steps = Steps()
    assert type(attention_registry.ATTENTION_BACKENDS[plugin.NAME](steps.runner)) is CutlassKernelsBackend
    factory = draft_utils.DraftBackendFactory
    assert factory._create_backend.__wrapped__ is not None


def test_the_command_line_takes_the_name(clean_registry):
    from sglang.srt.server_args import ServerArgs

    plugin.register()
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    given = ["--model-path", "x", "--attention-backend", plugin.NAME, "--speculative-draft-attention-backend"]
    assert parser.parse_args([*given, plugin.NAME]).attention_backend == plugin.NAME


@pytest.mark.parametrize("kind", ["decode", "extend"])
def test_the_factory_of_draft_backends(clean_registry, monkeypatch, kind):
    """SGLang's own factory, whose table has no row for backends from outside."""
    plugin.register()
    HookRegistry.apply_hooks()
    publish(monkeypatch, topk=1, drafts=4, steps=3)
    monkeypatch.setattr(draft_utils, "attention_backends", lambda: (plugin.NAME, plugin.NAME))
    monkeypatch.setattr(draft_utils, "get_spec", lambda: SimpleNamespace(speculative_attention_mode="decode"))
    monkeypatch.setattr(draft_utils, "_assert_draft_needs_no_conv_sidecar", lambda runner: None)
    monkeypatch.setattr(attention_registry, "attn_backend_wrapper_for_draft_extend", lambda runner, backend: backend)
    monkeypatch.setattr(attention_registry, "attn_backend_wrapper_for_draft_decode", lambda runner, backend: backend)
    runner = Steps().runner
    runner.draft_attention_backend = None
    factory = draft_utils.DraftBackendFactory(runner, topk=1, speculative_num_steps=3)
    if kind == "decode":
        made = factory.create_decode_backend()
        assert type(made) is MultiStepDraftBackend and [x.step for x in made.attn_backends] == [0, 1]
        assert made.attn_backends[1].decode_attention_backend_str == plugin.NAME
    else:
        made = factory.create_draft_extend_backend()
        assert type(made) is CutlassKernelsBackend and made.step is None
    assert made.decode_attention_backend_str == plugin.NAME


# --- the contract ---


def test_signatures():
    names = overridden(CutlassKernelsBackend, AttentionBackend)
    assert {"forward_decode", "forward_extend", "init_cuda_graph_state", "init_forward_metadata"} <= set(names)
    for name in names:
        assert_same_parameters(name, getattr(CutlassKernelsBackend, name), getattr(AttentionBackend, name))


def test_signatures_of_draft_backends():
    init = "init_forward_metadata"
    for name in (init, "init_cuda_graph_state", f"{init}_out_graph", f"{init}_in_graph"):
        ours, theirs = (getattr(x, name) for x in (MultiStepDraftBackend, TritonMultiStepDraftBackend))
        assert_same_parameters(name, ours, theirs)
    assert_same_parameters("_create_backend", with_our_row_of_factory, draft_utils.DraftBackendFactory._create_backend)


def with_our_row_of_factory(self, backend_name, backend_map, error_template, stamps_children=False):
    """The hook's parameters, with the factory's name for itself."""
    return with_our_row(self, backend_name, backend_map, error_template, stamps_children)


def test_calls_of_sglang():
    from sglang.srt.mem_cache.layout.paged_view import paged_kv_view
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
    from sglang.srt.model_executor.forward_batch_info import build_inner_fb_view

    assert_takes(KVWriteLoc.for_batch, None, swa_loc=None)
    assert_takes(paged_kv_view, None, 16, 2, 64)
    assert_takes(SWAKVPool.translate_loc_from_full_to_swa, None, None)
    for pool in (MHATokenToKVPool, SWAKVPool):
        assert_takes(pool.set_kv_buffer, None, None, None, None, None, None, None)
    assert_takes(build_inner_fb_view, None, bs=1, forward_mode=None)


# --- steps ---


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_steps(page_size, dtype):
    steps = Steps(page_size=page_size, dtype=dtype)
    steps.steps(STEPS)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("expected", [*(x for x in OPTIONS if x.window != 0), Expected(chunk_size=16)], ids=str)
def test_options(expected, page_size):
    """A window of 0 is none to SGLang."""
    Steps(expected, page_size).steps(STEPS)


@pytest.mark.parametrize("scales", [None, (0.5, 0.25)])
@pytest.mark.parametrize("expected", [Expected(), ALL], ids=["plain", "all"])
def test_fp8_caches(expected, scales):
    steps = Steps(expected, 16, torch.bfloat16, torch.float8_e4m3fn, scales)
    steps.steps(STEPS)


@pytest.mark.parametrize("page_size", [1, 4])
def test_windows_with_a_pool_of_their_own(page_size):
    steps = Steps(Expected(window=9), page_size, has_window_pool=True)
    steps.steps(STEPS)
    steps.backend.init_cuda_graph_state(8, 8)
    steps.step({1: 1, 2: 1}, graph=True)


def test_batch_invariance(monkeypatch):
    publish(monkeypatch, invariant=True)
    steps = Steps()
    assert steps.backend.batch_invariant
    steps.steps(STEPS)


def test_an_idle_batch():
    steps = Steps()
    batch = steps.batch(ForwardMode.IDLE, [], [], [])
    steps.backend.init_forward_metadata(batch)
    q = torch.zeros(0, HEADS * DIM).half()
    assert steps.backend.forward(q, q, q, steps.layer, batch).shape == (0, HEADS * DIM)


# --- speculative decoding ---


@pytest.mark.parametrize("drafts", [1, 3, 8, 9])
def test_masks_of_trees(drafts):
    lens, trees = torch.tensor([5, 0, 17]), [random_tree(drafts, seed) for seed in range(3)]
    whole = [torch.cat([torch.ones(drafts, m, dtype=torch.bool), x], 1).flatten() for m, x in zip(lens, trees)]
    packed = pack_trees(torch.cat(whole), lens, drafts)
    assert packed.shape == (3, tree_bytes(drafts))
    for row, tree in zip(packed, trees):
        bits = oracle.pack_bits(tree, "little")
        assert torch.equal(row[: len(bits)], bits) and not row[len(bits) :].any()


@GRAPHS
@pytest.mark.parametrize("expected", [Expected(), Expected(sinks=SINKS, soft_cap=8.0)], ids=["plain", "all"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_verification_of_trees(monkeypatch, page_size, expected, graph):
    publish(monkeypatch, topk=4, drafts=8, steps=3)
    steps = Steps(expected, page_size)
    steps.step({1: 37, 2: 5, 3: 20})
    if graph:
        steps.backend.init_cuda_graph_state(8, 64)
    for seed in range(3):
        steps.verify({1: random_tree(8, seed), 2: random_tree(8, seed + 10), 3: chain(8)}, graph)
    assert steps.backend.forward_metadata.tree_bits is not None


def test_smaller_trees_than_at_most_in_graphs(monkeypatch):
    publish(monkeypatch, topk=4, drafts=16, steps=3)
    steps = Steps(Expected(), 4)
    steps.step({1: 37, 2: 5})
    steps.backend.init_cuda_graph_state(8, 128)
    steps.verify({1: random_tree(5, 1), 2: random_tree(5, 2)}, graph=True)


def test_verification_of_trees_over_fp8_caches(monkeypatch):
    """The draft tokens themselves are read before they are rounded."""
    publish(monkeypatch, topk=4, drafts=8, steps=3)
    steps = Steps(Expected(), 16, torch.float16, torch.float8_e4m3fn, (0.5, 0.25))
    steps.step({1: 37, 2: 5})
    monkeypatch.setattr(steps, "kept", lambda x, index: x.float())
    steps.verify({1: random_tree(8, 1), 2: random_tree(8, 2)})


@GRAPHS
@pytest.mark.parametrize("expected", [Expected(), Expected(window=9, sinks=SINKS)], ids=["plain", "window"])
def test_verification_of_chains(monkeypatch, expected, graph):
    publish(monkeypatch, topk=1, drafts=4, steps=3)
    steps = Steps(expected, 4)
    steps.step({1: 37, 2: 5})
    if graph:
        steps.backend.init_cuda_graph_state(8, 64)
    for _ in range(2):
        steps.verify({1: chain(4), 2: chain(4)}, graph)
    assert steps.backend.forward_metadata.tree_bits is None


@pytest.mark.parametrize("known", [True, False], ids=["known", "on the GPU"])
def test_draft_extension(monkeypatch, known):
    """As many rows of every request, of which SGLang may not know the host's lengths."""
    publish(monkeypatch, topk=1, drafts=3, steps=2)
    steps = Steps(page_size=4)
    steps.step({1: 37, 2: 5})
    lengths = {1: 3, 2: 3}
    slots, q, k, v = steps.grow(lengths)
    more = dict(extend_seq_lens=torch.tensor([3, 3]), extend_seq_lens_cpu=[3, 3] if known else None)
    batch = steps.batch(ForwardMode.DRAFT_EXTEND_V2, [1, 2], [40, 8], slots, **more)
    steps.check(steps.forward(q, k, v, batch), q, lengths)


def test_draft_extension_in_graphs(monkeypatch):
    """A capture knows the lengths on the host, and SGLang's view of a replay has none of the batch's."""
    publish(monkeypatch, topk=1, drafts=3, steps=2)
    steps = Steps(page_size=4)
    steps.step({1: 37, 2: 5})
    steps.backend.init_cuda_graph_state(8, 24)
    info = SimpleNamespace(num_tokens_per_req=3)
    more = dict(extend_seq_lens=torch.tensor([3] * 4), extend_seq_lens_cpu=[3] * 4, spec_info=info)
    capture = steps.batch(ForwardMode.DRAFT_EXTEND_V2, [0] * 4, [1] * 4, [0] * 12, **more)
    steps.backend.init_forward_metadata_out_graph(capture, in_capture=True)
    held = steps.backend.forward_metadata
    assert held.max_query_len == 3 and held.starts.tolist() == [0, 3, 6, 9, 12]
    lengths = {1: 3, 2: 3}
    slots, q, k, v = steps.grow(lengths, padding=6)
    lens = torch.tensor([40, 8, 1, 1, 77])  # the whole buffer
    replay = SimpleNamespace(
        batch_size=4,
        forward_mode=ForwardMode.DRAFT_EXTEND_V2,
        input_ids=torch.zeros(6, dtype=torch.int64),  # those of 2 requests, though the graph has 4
        req_pool_indices=torch.tensor([1, 2, 0, 0, 0]),
        seq_lens=lens,
        seq_lens_cpu=lens.clone(),
        out_cache_loc=torch.tensor(slots + [0] * 6),
        spec_info=info,
    )
    steps.backend.init_forward_metadata_out_graph(replay)
    newer = steps.backend.forward_metadata
    for name in ("starts", "lens", "page_table"):
        assert getattr(newer, name).data_ptr() == getattr(held, name).data_ptr()
    batch = steps.batch(ForwardMode.DRAFT_EXTEND_V2, [], [], replay.out_cache_loc.tolist())
    out = steps.backend.forward(q, k, v, steps.layer, batch)
    steps.check(out[:6], q[:6], lengths)


def test_drafts_behind_the_longest_context_in_graphs(monkeypatch):
    """SGLang's table has room for them, and its lengths count them already."""
    publish(monkeypatch, topk=1, drafts=3, steps=2)
    steps = Steps()
    steps.runner.model_config.context_len = CONTEXT - 6
    backend = CutlassKernelsBackend(steps.runner)
    backend.init_cuda_graph_state(8, 24)
    more = dict(extend_seq_lens_cpu=[3], spec_info=SimpleNamespace(num_tokens_per_req=3))
    backend.init_forward_metadata_out_graph(
        steps.batch(ForwardMode.DRAFT_EXTEND_V2, [1], [CONTEXT - 3], [0] * 3, **more)
    )
    assert backend.forward_metadata.max_seq_len == CONTEXT == backend.forward_metadata.page_table.size(1)


def test_prompts_are_not_captured():
    steps = Steps()
    batch = steps.batch(ForwardMode.EXTEND, [1], [3], [5, 6, 7])
    with pytest.raises(NotImplementedError, match="'breakable'"):
        steps.backend.init_forward_metadata_out_graph(batch, in_capture=True)


@GRAPHS
def test_drafts_of_several_steps(monkeypatch, graph):
    """Step i reads the keys that steps before it wrote behind the sequence."""
    publish(monkeypatch, topk=1, drafts=4, steps=3)
    steps = Steps(page_size=4)
    steps.step({1: 37, 2: 5})
    multi = MultiStepDraftBackend(steps.runner, topk=1, speculative_num_steps=3)
    before = [steps.length(1), steps.length(2)]
    slots = [steps.place(request, 2) for request in (1, 2)]
    info = SimpleNamespace(is_draft_input=lambda: True)
    batch = steps.batch(ForwardMode.DECODE, [1, 2], before, [x for pair in slots for x in pair], spec_info=info)
    if graph:
        multi.init_cuda_graph_state(8, 16)
        multi.init_forward_metadata_out_graph(batch, in_capture=True)
        multi.init_forward_metadata_out_graph(batch)
        multi.init_forward_metadata_in_graph(batch)
    else:
        multi.init_forward_metadata(batch)
    for i, backend in enumerate(multi.attn_backends):
        q, k, v = steps.randn(2, HEADS), steps.randn(2, KV_HEADS), steps.randn(2, KV_HEADS)
        steps.remember({1: 1, 2: 1}, k, v)
        batch.out_cache_loc = torch.tensor([pair[i] for pair in slots])
        steps.check(backend.forward(q, k, v, steps.layer, batch), q, {1: 1, 2: 1})


# --- graphs ---


def test_replays_read_the_same_buffers():
    steps = Steps(page_size=4)
    steps.step({1: 37, 2: 5, 3: 9})
    backend = steps.backend
    backend.init_cuda_graph_state(8, 8)
    capture = steps.batch(ForwardMode.DECODE, [0, 0, 0], [1, 1, 1], [0, 0, 0])
    backend.init_forward_metadata_out_graph(capture, in_capture=True)
    held = backend.forward_metadata
    assert held.max_seq_len >= CONTEXT and held.max_query_len == 1
    backend.init_forward_metadata_in_graph(capture)
    steps.step({1: 1, 2: 1, 3: 1}, graph=True)
    newer = backend.forward_metadata
    for name in ("starts", "lens", "page_table"):
        assert getattr(newer, name).data_ptr() == getattr(held, name).data_ptr()
    assert held.lens.tolist() == [38, 6, 10] and newer.lens.shape == (3,)
    assert backend.get_cuda_graph_seq_len_fill_value() == 1


def test_padded_replays():
    """Requests behind the batch have a key each, of slot 0, and nobody reads their rows."""
    steps = Steps(page_size=4)
    steps.step({1: 37, 2: 5})
    steps.backend.init_cuda_graph_state(8, 8)
    slots, q, k, v = steps.grow({1: 1, 2: 1}, padding=2)
    batch = steps.batch(ForwardMode.DECODE, [1, 2, 0, 0], [38, 6, 1, 1], [*slots, 0, 0])
    out = steps.forward(q, k, v, batch, graph=True)
    steps.check(out[:2], q[:2], {1: 1, 2: 1})
    assert out.isfinite().all()


# --- refusals ---


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (dict(use_mla_backend=True), "MLA"),
        (dict(model_config=SimpleNamespace(context_len=9, is_encoder_decoder=True)), "cross attention"),
        (dict(kv_cache_dtype=torch.float8_e5m2), "caches of torch.float8_e5m2"),
        (dict(kv_index_translator=SimpleNamespace(is_translating=True)), "the unified memory pool"),
    ],
)
def test_refused_models(change, what):
    runner = Steps().runner
    vars(runner).update(change)
    with pytest.raises(NotImplementedError, match=f"does not serve {what}"):
        plugin.create(runner)


def test_refused_settings(monkeypatch):
    runner = Steps().runner
    publish(monkeypatch, dcp=2)
    with pytest.raises(NotImplementedError, match="context parallelism"):
        plugin.create(runner)
    publish(monkeypatch, topk=4, drafts=8)
    runner.sliding_window_size = 9
    with pytest.raises(NotImplementedError, match="draft trees in models with sliding windows"):
        plugin.create(runner)
    with pytest.raises(NotImplementedError, match="--speculative-draft-attention-backend"):
        MultiStepDraftBackend(runner, topk=4, speculative_num_steps=3)


def test_refused_layers_and_arguments():
    steps = Steps()
    batch = steps.batch(ForwardMode.DECODE, [1], [1], [5])
    steps.backend.init_forward_metadata(batch)
    q = torch.zeros(1, HEADS, DIM).half()
    with pytest.raises(NotImplementedError, match="q_rope"):
        steps.backend.forward(q, q[:, :2], q[:, :2], steps.layer, batch, q_rope=q)
    steps.layer.xai_temperature_len = 5
    with pytest.raises(NotImplementedError, match="temperatures"):
        steps.backend.forward(q, q[:, :2], q[:, :2], steps.layer, batch)
