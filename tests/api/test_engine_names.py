"""Names that vLLM's and SGLang's FlashInfer backends import, and those among them that only raise."""

from __future__ import annotations

import doctest
import importlib

import pytest
import torch

import cutlass_kernels as ck

EMPTY = torch.empty(0, dtype=torch.uint8)
NAMES = {
    "cutlass_kernels": [
        "BatchAttentionWithAttentionSinkWrapper",
        "BatchMLAPagedAttentionWrapper",
        "BatchDecodeWithPagedKVCacheWrapper",
        "BatchPrefillWithPagedKVCacheWrapper",
        "BatchPrefillWithRaggedKVCacheWrapper",
        "MultiLevelCascadeAttentionWrapper",
        "fast_decode_plan",
        "nvfp4_quantize_append_paged_kv_cache",
        "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
    ],
    "cutlass_kernels.decode": [
        "_get_range_buf",
        "get_seq_lens",
        "fast_decode_plan",
        "trtllm_batch_decode_with_kv_cache",
        "trtllm_batch_decode_with_kv_cache_mla",
        "xqa_batch_decode_with_kv_cache",
    ],
    "cutlass_kernels.mla": ["BatchMLAPagedAttentionWrapper", "flash_mla_with_kvcache", "get_mla_metadata"],
    "cutlass_kernels.prefill": ["trtllm_batch_context_with_kv_cache", "trtllm_fmha_v2_prefill"],
    "cutlass_kernels.page": [
        "append_paged_kv_cache",
        "append_paged_mla_kv_cache",
        "get_seq_lens",
        "nvfp4_quantize_append_paged_kv_cache",
        "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
    ],
    "cutlass_kernels.cascade": ["merge_state", "MultiLevelCascadeAttentionWrapper"],
    "cutlass_kernels.utils": ["FP4Tensor", "get_device_sm_count", "get_trtllm_gen_multi_ctas_kv_counter_bytes"],
}


@pytest.mark.parametrize("module", NAMES)
def test_names(module):
    found = importlib.import_module(module)
    assert [name for name in NAMES[module] if not hasattr(found, name)] == []


def test_what_is_for_blackwell_raises_when_called():
    for call in (
        ck.utils.FP4Tensor,
        ck.nvfp4_quantize_append_paged_kv_cache,
        ck.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,
    ):
        with pytest.raises(NotImplementedError, match=f"{call.__name__} is for 4-bit floats, .* Blackwell"):
            call(EMPTY, EMPTY, k_scale=1.0)


def test_helpers():
    assert ck.decode._get_range_buf(4, "cpu").tolist() == [0, 1, 2, 3]
    counter_bytes = ck.utils.get_trtllm_gen_multi_ctas_kv_counter_bytes
    assert counter_bytes(2, 8, 132) == 544 and counter_bytes(100, 8, 132) == 3200
    with pytest.raises(ValueError, match="device='cpu' has no streaming multiprocessors"):
        ck.utils.get_device_sm_count(torch.device("cpu"))


@pytest.mark.gpu
def test_the_number_of_multiprocessors():
    properties = torch.cuda.get_device_properties(0)
    for device in ("cuda", 0, torch.device("cuda:0")):
        assert ck.utils.get_device_sm_count(device) == properties.multi_processor_count


@pytest.mark.parametrize(
    "module",
    [
        "_fronts.trtllm",
        "_fronts.flash_mla",
        "_planned.latent_plans",
        "_planned.latent_wrapper",
        "_planned.sink_wrapper",
        "_caches.slots_of_tokens",
        "utils",
    ],
)
def test_examples_of_the_documentation(module):
    found = importlib.import_module(f"cutlass_kernels.{module}")
    documented = {name: x for name, x in vars(found).items() if getattr(x, "__module__", None) == found.__name__}
    finder, names = doctest.DocTestFinder(), {"torch": torch, **vars(found)}
    examples = [test for name, x in documented.items() for test in finder.find(x, name, False, globs=names)]
    results = [doctest.DocTestRunner().run(example) for example in examples]
    assert sum(x.attempted for x in results) and not sum(x.failed for x in results)
