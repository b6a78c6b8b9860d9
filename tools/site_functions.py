"""For the site: functions that the package makes when it is imported, which the sources do not show."""

from __future__ import annotations

from typing import Any

import griffe

MADE = {
    "cutlass_kernels._attend.plan_free": ["attention"],
    "cutlass_kernels._attend.singles": [
        "single_prefill_with_kv_cache",
        "single_prefill_with_kv_cache_return_lse",
        "single_decode_with_kv_cache",
    ],
    "cutlass_kernels._fronts.flash_functions": [
        "flash_attn_func",
        "flash_attn_qkvpacked_func",
        "flash_attn_varlen_func",
        "flash_attn_with_kvcache",
    ],
    "cutlass_kernels._fronts.trtllm": [
        "trtllm_batch_decode_with_kv_cache",
        "xqa_batch_decode_with_kv_cache",
        "trtllm_batch_context_with_kv_cache",
        "trtllm_batch_decode_with_kv_cache_mla",
    ],
}


class MadeFunctions(griffe.Extension):
    """Puts what Python sees of these functions in the place of what the sources say."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        if pkg.name != "cutlass_kernels":
            return
        parser, options = loader.docstring_parser, loader.docstring_options
        for module, names in MADE.items():
            path = module.partition(".")[2]
            seen = griffe.inspect(module, filepath=None, docstring_parser=parser, docstring_options=options)
            for name in names:
                pkg[path].set_member(name, seen[name])
