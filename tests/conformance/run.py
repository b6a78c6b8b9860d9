"""Runs attention tests of FlashAttention-3, FlashInfer or FlashMLA, unmodified, through our names (see README.md beside
it)."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Those of FlashInfer's files whose functions we have.
FLASHINFER = [
    "alibi",
    "attention_sink",
    "batch_attention",
    "batch_decode_kernels",
    "batch_invariant_fa2",
    "batch_prefill",
    "batch_prefill_kernels",
    "block_sparse",
    "decode_fp8_calibration_scale",
    "decode_prefill_lse",
    "deepseek_mla",
    "fmha_v2_prefill",
    "fp8_prefill",
    "hopper",
    "hopper_fp8_attention",
    "hopper_fp8_sliding_window",
    "logits_cap",
    "mla_page",
    "non_contiguous_decode",
    "non_contiguous_prefill",
    "page",
    "shared_prefix_kernels",
    "single_prefill",
    "sliding_window",
    "tensor_cores_decode",
    "xqa_batch_decode",
    "workspace_size",
    "trtllm_gen_attention_prefill",
    "trtllm_ragged_kv_stride",
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path, help="a checkout of flash-attention, flashinfer or FlashMLA")
    parser.add_argument("--limit-s", type=float, default=0.0, help="seconds after which cases are skipped (0: none)")
    parser.add_argument("--at-most", type=int, default=0, help="cases of the random order (0: all)")
    parser.add_argument("--seed", type=int, default=1, help="of the order")
    parser.add_argument("--workers", type=int, default=8, help="processes that share the GPU")
    options, others = parser.parse_known_args()
    checkout = options.checkout.resolve()
    deselected: list[str] = []
    pytest_options: list[str] = []
    environment = dict(os.environ, CK_CONFORMANCE_CHECKOUT=str(checkout), FLASH_ATTENTION_DISABLE_BACKWARD="TRUE")
    if (checkout / "hopper").is_dir():
        names, root = "flash_attn_names", checkout / "hopper"
        files = ["test_flash_attn.py", "test_attn_kvcache.py"]
        deselected = [
            "test_flash_attn.py::test_flash_attn_race_condition",  # of backward, which has no kernels here
            "test_flash_attn.py::test_flash3_bw_compatibility",  # of the schemas of FlashAttention's own operators
            # It subtracts a 16-bit result from an 8-bit reference, which torch does not do, whoever computed them.
            "test_attn_kvcache.py::test_flash_attn_kvcache_nosplit_fp8",
        ]
    elif (checkout / "tests" / "kernelkit").is_dir():
        names, root = "flash_mla_names", checkout / "tests"
        files = [str(HERE / "flash_mla_scripts.py")]
        # Without the conftest.py of our own tests; and large cases in one process.
        pytest_options = ["--confcutdir", str(HERE), "--dist", "loadgroup"]
    else:
        names, root = "flashinfer_names", checkout
        files = [f"tests/attention/test_{name}.py" for name in FLASHINFER]
    given = [Path(path).resolve() for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment["PYTHONPATH"] = os.pathsep.join(map(str, [HERE / names, HERE, root, *given]))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "sample", "-p", "no:cacheprovider", "--rootdir", str(root)]
    command += ["-n", str(options.workers), "--order-seed", str(options.seed), "--at-most", str(options.at_most)]
    command += ["--limit-s", str(options.limit_s), "--import-mode=importlib", *pytest_options, *others]
    for name in deselected:
        command += ["--deselect", name]
    # From here, as Python looks for modules in the working directory first.
    return subprocess.run([*command, *(str(root / file) for file in files)], cwd=HERE, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
