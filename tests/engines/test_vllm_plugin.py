"""The plug-in for vLLM on vLLM's own classes, without a GPU: the reference computes, the oracle judges."""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from types import ModuleType

import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; tools/test_plugins.py installs and tests it", allow_module_level=True)

import numpy as np
import vllm.plugins
from contracts import assert_same_parameters, assert_takes, overridden
from distribution import write_distribution
from engine_steps import ALL, DIM, HEADS, KV_HEADS, OPTIONS, SINKS, Expected
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
)
from vllm.v1.attention.backends import registry
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm_steps import BLOCK, Ranks, Steps, config

import cutlass_kernels.integrations.vllm as plugin
from cutlass_kernels.integrations import _engines
from cutlass_kernels.integrations.vllm.backend import CutlassKernelsBackend
from cutlass_kernels.integrations.vllm.impl import CutlassKernelsImpl
from cutlass_kernels.integrations.vllm.metadata import MetadataBuilder

# Prompts, a prompt in chunks beside decodes, and decodes of one and of several tokens (speculative decoding).
STEPS = [{1: 37, 2: 5}, {3: 20, 1: 1, 2: 1}, {3: 23, 1: 1}, {1: 1, 2: 1, 3: 1}, {1: 4, 2: 4, 3: 4}]


@pytest.fixture
def clean_registry(monkeypatch):
    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {})
    monkeypatch.setattr(vllm.plugins, "plugins_loaded", False)


# --- registration and choice ---


def test_the_installed_release_is_served():
    assert _engines.is_served("vllm", importlib.metadata.version("vllm"))


def test_vllm_loads_the_entry_point(clean_registry, monkeypatch, tmp_path):
    write_distribution(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("VLLM_PLUGINS", "cutlass_kernels")
    vllm.plugins.load_general_plugins()
    assert AttentionBackendEnum["CUSTOM"].get_class() is CutlassKernelsBackend
    plugin.register()  # a second time changes nothing
    assert AttentionBackendEnum.CUSTOM.get_path() == plugin.BACKEND


def test_another_custom_backend_stays(clean_registry, caplog):
    registry.register_backend(AttentionBackendEnum.CUSTOM, "somebody.Else")
    with caplog.at_level("WARNING", "cutlass_kernels"):
        plugin.register()
    assert AttentionBackendEnum.CUSTOM.get_path() == "somebody.Else" and "VLLM_PLUGINS" in caplog.text


def select(monkeypatch, capability=(9, 0), **given):
    """What vLLM's CUDA platform answers to --attention-backend CUSTOM. Its binary module needs a driver."""
    from vllm.platforms.interface import DeviceCapability

    monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", ModuleType("vllm._C_stable_libtorch"))
    from vllm.platforms.cuda import CudaPlatformBase

    class Platform(CudaPlatformBase):
        @classmethod
        def get_device_capability(cls, device_id=0):
            return DeviceCapability(*capability)

    wanted = dict(head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=None) | given
    plugin.register()
    return Platform.get_attn_backend_cls(AttentionBackendEnum.CUSTOM, AttentionSelectorConfig(**wanted))


@pytest.mark.parametrize(
    "given",
    [
        dict(),
        dict(head_size=512),
        dict(kv_cache_dtype="fp8", head_size=256),
        dict(kv_cache_dtype="fp8_e4m3", use_per_head_quant_scales=True),
        dict(has_sink=True, has_sliding_window=True),
        dict(attn_type=AttentionType.ENCODER_ONLY),
        dict(attn_type=AttentionType.ENCODER_DECODER),
        dict(use_dcp=True, use_kv_connector=True),
        dict(use_batch_invariant=True, use_non_causal=True, use_adaptive_verification=True),
        dict(block_size=48),
        dict(capability=(8, 0), has_sink=True),
    ],
    ids=str,
)
def test_what_vllm_may_choose_it_for(clean_registry, monkeypatch, given):
    assert select(monkeypatch, **given) == plugin.BACKEND


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (dict(use_mla=True), "MLA"),
        (dict(use_sparse=True), "sparse"),
        (dict(use_mm_prefix=True), "multimodal"),
        (dict(use_pcp=True), "PCP"),
        (dict(use_rswa=True), "R-SWA"),
        (dict(dtype=torch.float32), "dtype"),
        (dict(head_size=520), "head_size"),
        (dict(head_size=100), "head_size"),
        (dict(kv_cache_dtype="fp8_e5m2"), "kv_cache_dtype"),
        (dict(kv_cache_dtype="float16"), "caches of 16 bits have the type of the model"),
        (dict(kv_cache_dtype="fp8", head_size=512), "fp8 caches take head sizes up to 256"),
        (dict(block_size=8), "block_size"),
        (dict(capability=(7, 5)), "compute capability"),
    ],
    ids=str,
)
def test_what_vllm_refuses_it_for(clean_registry, monkeypatch, given, reason):
    with pytest.raises(ValueError, match=reason):
        select(monkeypatch, **given)


# --- the contract ---


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (CutlassKernelsBackend, AttentionBackend),
        (MetadataBuilder, AttentionMetadataBuilder),
        (CutlassKernelsImpl, AttentionImpl),
    ],
)
def test_signatures(ours, theirs):
    names = overridden(ours, theirs)
    assert len(names) >= 3
    for name in names:
        assert_same_parameters(f"{ours.__name__}.{name}", getattr(ours, name), getattr(theirs, name))
    assert not inspect.isabstract(ours)


def test_signatures_that_vllm_finds_by_name():
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    ours, theirs = CutlassKernelsImpl, FlashAttentionImpl
    assert_same_parameters("do_kv_cache_update", ours.do_kv_cache_update, theirs.do_kv_cache_update)
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)


def test_calls_of_vllm():
    from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens
    from vllm.v1.attention.ops.dcp import cp_lse_ag_out_rs, dcp_a2a_lse_reduce

    assert_takes(get_dcp_local_seq_lens, None, 2, 0, 1)
    for combine in (cp_lse_ag_out_rs, dcp_a2a_lse_reduce):
        assert_takes(combine, None, None, None, return_lse=True, is_lse_base_on_e=False)


def test_graphs_of_mixed_batches():
    assert MetadataBuilder.get_cudagraph_support(config(), None) is AttentionCGSupport.ALWAYS


# --- steps ---


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", KVCacheLayout)
def test_steps_in_every_layout(layout, dtype):
    steps = Steps(layout=layout, dtype=dtype, cache_dtype=str(dtype).removeprefix("torch."))
    assert tuple(steps.layer.kv_cache.shape) == (48, KV_HEADS, BLOCK, 2 * DIM)
    steps.steps(STEPS)


@pytest.mark.parametrize("expected", [*OPTIONS, Expected(alibi=True)], ids=str)
def test_options(expected):
    Steps(expected).steps(STEPS)


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.5, 0.25), ([0.5, 0.125], [0.25, 2.0])], ids=["1", "tensor", "head"])
@pytest.mark.parametrize("expected", [Expected(), ALL], ids=["plain", "all"])
def test_fp8_caches(expected, scales):
    steps = Steps(expected, cache_dtype="fp8", scales=scales, dtype=torch.bfloat16)
    assert steps.layer.kv_cache.dtype == torch.uint8 and steps.layer.query_quant is None
    steps.steps(STEPS)


def test_sinks_that_are_loaded_again():
    steps = Steps(Expected(sinks=SINKS))
    impl, address = steps.layer.impl, steps.layer.impl.sinks.data_ptr()
    impl.model_sinks.copy_(SINKS + 1.0)
    steps.layer.process_weights_after_loading(steps.dtype)
    assert impl.sinks.data_ptr() == address and impl.sinks.dtype == torch.float32
    steps.expected.sinks = SINKS + 1.0
    steps.step(STEPS[0])


def test_scales_of_16_bit_caches_have_no_effect():
    steps = Steps(scales=(0.5, 2.0))
    steps.step(STEPS[0])


def test_a_prefix_in_common_changes_nothing():
    """vLLM dropped cascade attention: the argument is 0 there, and of no effect here."""
    steps = Steps()
    steps.step(STEPS[0])
    build = steps.builder.build
    steps.builder.build = lambda prefix, common, fast_build=False: build(32, common, fast_build=True)
    steps.step({1: 1, 2: 1})


def test_batch_invariance(monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    steps = Steps()
    assert steps.layer.impl.options["batch_invariant"] is True
    steps.steps(STEPS)


# --- graphs ---


def test_padded_steps_as_in_full_graphs():
    steps = Steps()
    for lengths in STEPS:
        metadata = steps.step(lengths, padding=3)
        assert metadata.num_actual_tokens == sum(lengths.values()) + 3


def test_metadata_reads_the_buffers_of_vllm():
    """What a replay must follow is read where vLLM updates it, and bounds are those of the capture."""
    steps = Steps()
    steps.step({1: 5})
    common = steps.common([1], [0, 5], [-1] * 5, 0).replace(max_query_len=512, max_seq_len=4096)
    metadata = steps.builder.build_for_cudagraph_capture(common)
    for ours, theirs in (
        (metadata.query_start_loc, common.query_start_loc),
        (metadata.seq_lens, common.seq_lens),
        (metadata.block_table, common.block_table_tensor),
        (metadata.slot_mapping, common.slot_mapping),
    ):
        assert ours.data_ptr() == theirs.data_ptr()
    assert (metadata.max_query_len, metadata.max_seq_len) == (512, 4096)
    before = copy.copy(metadata)
    steps.builder.update_draft_decode_metadata(metadata)
    assert metadata == before
    table, slots = torch.zeros(1, 3, dtype=torch.int32), torch.zeros(5, dtype=torch.int64)
    updated = steps.builder.update_block_table(metadata, table, slots)
    assert updated.block_table is table and updated.slot_mapping is slots and metadata.block_table is not table
    assert steps.builder.supports_draft_decode_metadata_update and steps.builder.supports_update_block_table


def test_build_for_drafting():
    steps = Steps()
    steps.step({1: 5})
    common = steps.common([1], [0, 5], [-1] * 5, 0)
    assert steps.builder.build_for_drafting(common, 0).seq_lens is common.seq_lens


# --- layers that vLLM derives from a backend ---


def with_backend(monkeypatch, module: str):
    """The module's layers take this plug-in's backend, as --attention-backend CUSTOM has it."""
    imported = importlib.import_module(f"vllm.model_executor.layers.attention.{module}")
    monkeypatch.setattr(imported, "get_attn_backend", lambda *args, **kwargs: CutlassKernelsBackend)
    return imported


@pytest.mark.parametrize("window", [-1, 5])
def test_encoder_only_attention(monkeypatch, window):
    module = with_backend(monkeypatch, "encoder_only_attention")
    steps = Steps(Expected(causal=False, window=window), layer_class=module.EncoderOnlyAttention)
    steps.step({1: 37, 2: 1, 3: 20})
    steps.step({4: 11}, padding=2)


def test_chunked_local_attention(monkeypatch):
    module = with_backend(monkeypatch, "chunked_local_attention")
    monkeypatch.setattr("vllm.utils.torch_utils.PIN_MEMORY", False)  # there is no GPU to copy to
    size = 16

    def make(heads, dim, scale, num_kv_heads, prefix, cache_config, **given):
        return module.ChunkedLocalAttention(
            heads, dim, scale, size, num_kv_heads=num_kv_heads, cache_config=cache_config, prefix=prefix
        )

    steps = Steps(Expected(chunk_size=size), layer_class=make)
    for lengths in STEPS:
        metadata = steps.step(lengths)
        # The direct call takes Python's integers alone, and vLLM's bound of virtual batches is numpy's.
        assert type(metadata.max_query_len) is int and type(metadata.max_seq_len) is int


def test_cross_attention(monkeypatch):
    module = with_backend(monkeypatch, "cross_attention")
    steps = Steps(Expected(causal=False), layer_class=module.CrossAttention)
    lengths, encoder = {1: 3, 2: 4}, {1: 21, 2: 40}
    _, _, k, v = steps.grow(encoder)
    for rows, is_first in ((list(lengths.values()), True), ([1, 1], False)):
        starts = [0, rows[0], sum(rows)]
        q = torch.randn(sum(rows), HEADS, DIM).half()
        common = steps.common([1, 2], starts, [-1] * sum(rows), 0)
        seen = torch.tensor(rows if is_first else [x + 1 for x in lengths.values()], dtype=torch.int32)
        lens = np.array(list(encoder.values()), dtype=np.int32)
        common = common.replace(
            seq_lens=seen,
            seq_lens_cpu_upper_bound=seen,
            encoder_seq_lens=torch.from_numpy(lens),
            encoder_seq_lens_cpu=lens,
        )
        metadata = steps.builder.build(0, common)
        new = (k, v) if is_first else (None, None)
        out = steps.layer.impl.forward(
            steps.layer, q, *new, steps.layer.kv_cache, metadata, torch.full_like(q, torch.nan)
        )
        steps.check(out, q, dict(zip(encoder, rows)))


# --- decode context parallelism ---


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("sinks", [None, torch.cat([SINKS, SINKS - 1.0])], ids=["plain", "sinks"])
@pytest.mark.parametrize("interleave", [1, 4])
def test_decode_context_parallelism(interleave, sinks, cache_dtype):
    Ranks(2, interleave, Expected(sinks=sinks), cache_dtype).steps(STEPS)


def test_ranks_agree_on_whether_there_is_a_context():
    """Rank 1 has no key of a context of one token, and takes part all the same."""
    ranks = Ranks(2, 1, Expected())
    builders = [x.builder for x in ranks.ranks]
    assert [x.max_context_len for x in ranks.step({1: 1})] == [0, 0]
    second = ranks.step({1: 1})
    assert [x.max_context_len for x in second] == [1, 1]
    assert [x.context_lens.tolist() for x in second] == [[1], [0]]
    assert [x.context_lens.data_ptr() for x in second] == [x.context_lens.data_ptr() for x in builders]


def test_it_returns_lses():
    assert CutlassKernelsImpl.can_return_lse_for_decode and CutlassKernelsBackend.supports_dcp()
    assert not CutlassKernelsImpl.lse_base_on_e


# --- refusals, and the calls that compute nothing ---


def make_impl(**given):
    with_config = dict(num_heads=HEADS, head_size=DIM, scale=0.1, num_kv_heads=KV_HEADS) | given
    return CutlassKernelsImpl(**with_config)


@pytest.mark.parametrize(
    "given",
    [
        dict(alibi_slopes=[0.5] * HEADS, logits_soft_cap=4.0),
        dict(alibi_slopes=[0.5] * HEADS, attn_type=AttentionType.ENCODER_ONLY),
        dict(kv_cache_dtype="fp8", attn_type=AttentionType.ENCODER_ONLY),
    ],
    ids=str,
)
def test_refused_layers(given):
    with pytest.raises(NotImplementedError, match="cutlass_kernels does not serve"):
        make_impl(**given)


@pytest.mark.parametrize("given", [dict(sliding_window=8), dict(alibi_slopes=[0.5] * HEADS)], ids=str)
def test_refused_layers_of_context_parallelism(given, monkeypatch):
    import vllm.distributed.parallel_state as parallel

    monkeypatch.setattr(parallel, "get_dcp_world_size_and_rank", lambda sharded: (2, 0))
    assert make_impl().need_to_return_lse_for_decode
    with pytest.raises(NotImplementedError, match="decode context parallelism"):
        make_impl(**given)


def test_refused_steps():
    steps = Steps()
    steps.step({1: 3})
    common = steps.common([1], [0, 3], [-1] * 3, 0).replace(causal=torch.ones(1, dtype=torch.int32))
    with pytest.raises(NotImplementedError, match="not by request"):
        steps.builder.build(0, common)
    q = torch.zeros(3, HEADS, DIM).half()
    with pytest.raises(NotImplementedError, match="fuse_attn_quant"):
        steps.layer.impl.forward(steps.layer, q, q, q, steps.layer.kv_cache, None, q, output_scale=torch.ones(1))


def test_the_profiling_run_writes_zeros():
    steps = Steps()
    q, out = torch.ones(3, HEADS, DIM).half(), torch.full((3, HEADS, DIM), torch.nan).half()
    assert steps.layer.impl.forward(steps.layer, q, q, q, steps.layer.kv_cache, None, out) is out
    assert not out.any()


def test_a_layer_that_shares_the_cache_of_another():
    """vLLM then writes nothing, and passes no keys where a fused operation wrote them."""
    steps = Steps()
    steps.step({1: 20})
    common = steps.common([1], [0, 1], [-1], 0)
    q, out = torch.randn(1, HEADS, DIM).half(), torch.empty(1, HEADS, DIM).half()
    metadata = steps.builder.build(0, common)
    steps.layer.impl.forward(steps.layer, q, None, None, steps.layer.kv_cache, metadata, out)
    steps.check(out, q, {1: 1})
