"""The runner of FlashMLA's tests, on scripts of their form: no checkout is needed, nor a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from paths import ROOT

# A case passes, computes something else, is refused, or fails by itself.
SCRIPT = """
import argparse
import dataclasses

import flash_mla
import kernelkit
import torch


@dataclasses.dataclass
class TestParam:
    kind: str
    topk: int = 4
    s_q: int = 2
    d_qk: int = 576
    seed: int = -1
    check_correctness: bool = True
    num_runs: int = 10


def FUNCTION(p):
    assert p.num_runs == 0 and p.seed >= 0
    q = torch.randn(p.s_q, 4, 576)
    assert q.dtype == torch.bfloat16
    indices = torch.randint(9, (p.s_q, 1, p.topk), dtype=torch.int32)
    out, _, _ = flash_mla.flash_mla_sparse_fwd(q, torch.zeros(9, 1, 576), indices, 0.5)
    if p.kind == "refused":
        lens = torch.ones(p.s_q, dtype=torch.int32).cuda()
        cache, table = torch.zeros(1, 64, 1, 576), torch.zeros(p.s_q, 1, dtype=torch.int32)
        flash_mla.flash_mla_with_kvcache(q[:, None], cache, table, lens, 512, None, attn_sink=torch.zeros(4))
    if p.kind == "raises":
        raise NotImplementedError("by the script")
    return bool((out == (1 if p.kind == "wrong" else 0)).all())


if __name__ == "__main__":
    argparse.ArgumentParser().parse_known_args()
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("cuda:0")
    testcases = [TestParam(kind) for kind in ("right", "wrong", "refused", "raises")]
    for test in testcases:
        FUNCTION(test)
"""


def checkout(folder: Path) -> None:
    (folder / "tests" / "kernelkit").mkdir(parents=True)
    (folder / "tests" / "kernelkit" / "__init__.py").write_text("import triton\nmark = triton.jit(lambda: None)\n")
    of_decode = (
        "@dataclasses.dataclass\nclass Decode:\n    b: int\n    extra_topk: object = 4\n\n\n@dataclasses.dataclass"
    )
    for name, function in (
        ("sparse_prefill", "run_test"),
        ("sparse_decoding", "test_flash_mla"),
        ("dense_decoding", ""),
    ):
        text = SCRIPT.replace("FUNCTION", function or "test_flash_mla")
        if name == "sparse_decoding":
            text = text.replace("@dataclasses.dataclass", of_decode, 1).replace(
                "    seed:", "    decode: object = None\n    seed:"
            )
            text = text.replace("TestParam(kind)", "TestParam(kind, decode=Decode(1))")
        (folder / "tests" / f"test_flash_mla_{name}.py").write_text(text)


def test_scripts_run_as_tests(tmp_path: Path) -> None:
    checkout(tmp_path)
    environment = dict(os.environ, CUDA_VISIBLE_DEVICES="", PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    command = [sys.executable, str(ROOT / "tests" / "conformance" / "run.py"), str(tmp_path), "--workers", "1", "-rA"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    words = done.stdout + done.stderr
    functions = ("sparse_prefill", "sparse_decoding", "dense_decoding", "dense_decoding_in_fp16")
    for function in functions:
        for kind, outcome in (("right", "PASSED"), ("wrong", "FAILED"), ("raises", "FAILED")):
            assert re.search(rf"^{outcome} \S*::test_{function}\[kind{kind}-", words, re.M), words
    skipped = len(functions) + 1  # no case of the decoding script has a single cache
    assert f"{2 * len(functions)} failed, {len(functions)} passed, {skipped} skipped" in words
    assert "does not serve attn_sink=a tensor (4,): without indices, call attention(sinks=)" in words
