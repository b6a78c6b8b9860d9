"""Measures what the documentation states of one GPU, and writes it to docs/data.

    python benchmarks/figures.py                       # all of it: 20 minutes of an H200, with FlashInfer's compiler
    python benchmarks/figures.py --only decode,latent --rounds 3 --out results
    CK_BACKENDS=fa2 pip install . && python benchmarks/figures.py      # of fa2's prefill alone

Peers: flash_attn_interface or vLLM, flash_mla, flashinfer, and those of PyTorch; whatever is not installed leaves gaps.
Afterwards `python tools/site_figures.py` writes the tables, sentences and pictures of the pages. Figures of several
GPUs are those of distributed/bench.py, those of engines of the commands in docs/engines.md.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import bench
import errors
import torch
from measure import ROOT, commit_of
from sources import digests

import cutlass_kernels as ck

DATA = ROOT / "docs" / "data"
MEASUREMENTS = {
    "prefill": "prefill --workload paper --backends fa3,flash_attn_3,cudnn",
    "fp8": "prefill --workload paper --dtype float8_e4m3fn --backends fa3,flash_attn_3",
    "decode": "decode --backends auto,flashinfer,flashinfer_tc",
    "plan-free": "plan_free --workload plan_free,plan_free_mixtures",
    "fused": "fused --backends auto,contiguous",
    "latent": "mla_decode --workload mla-decode,mla-decode-varied --backends auto,flash_mla,flashinfer_fa3",
    "latent-e4m3": "mla_decode --dtype float8_e4m3fn --backends auto,flash_mla",
    "block-sparse": "block_sparse --backends blocks,heads,dense,flashinfer_fa3,flashinfer_heads",
    "host": "host --backends auto,torch_add,torch_fa2,flashinfer_fa3",
}
# Builds with fa3 leave the large tiles of fa2 out for Hopper: measured with CK_BACKENDS=fa2.
OF_FA2 = {"prefill-fa2": "prefill --workload paper --backends fa2,torch_fa2,flashinfer_fa2"}
KEPT = ("group", "column", "backend", "figure", "unit", "seconds", "spread", "rounds")  # of a result


def measured(command: str, options: list[str]) -> dict[str, Any]:
    """What a command of bench.py writes, without the single rounds."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [*shlex.split(command), *options, "--out", folder, "--name", "figures"]
        own, sys.argv = sys.argv, ["benchmarks/bench.py", *shlex.split(command), *options]  # what the report calls it
        try:
            wrong = bench.app(arguments, standalone_mode=False)  # the exit code
        finally:
            sys.argv = own
        data: dict[str, Any] = json.loads((Path(folder) / "figures.json").read_text())
    results = [{key: result.get(key) for key in KEPT} for result in data["results"] if result["figure"] is not None]
    if wrong:
        raise RuntimeError(f"bench.py {command}: a result of this library is wrong, or a call failed.")
    return {"environment": data["environment"], "results": results}


def written(data: dict[str, Any]) -> str:
    """A line per result: a change of a figure is a change of a line."""
    lines = ",\n".join(f"  {json.dumps(result)}" for result in data["results"])
    environment = json.dumps(data["environment"], indent=1).replace("\n", "\n ")
    return f'{{\n "environment": {environment},\n "results": [\n{lines}\n ]\n}}\n'


def main() -> None:
    has_fa3 = any(kernel["backend"] == "fa3" for kernel in ck.list_kernels())
    commands = MEASUREMENTS if has_fa3 else OF_FA2
    names = [*commands, "errors"] if has_fa3 else [*commands]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(names), help="some of %(default)s")
    parser.add_argument("--out", type=Path, default=DATA, help="folder of the files (docs/data)")
    parser.add_argument("--rounds", type=int, help="rounds per case (7)")
    args = parser.parse_args()
    wanted = args.only.split(",")
    if unknown := set(wanted) - set(names):
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of what this build serves: {', '.join(names)}.")
    if not torch.cuda.is_available():
        sys.exit("There is no CUDA device here: run this on a machine with the GPU whose figures you want.")
    built, here = getattr(ck._core.native._C, "commit", ""), commit_of(ROOT)
    if built and here != "unknown" and built.rstrip("+")[:7] != here[:7]:
        sys.exit(f"The package was built from commit {built}, this is {here}: install it from here first.")
    args.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in wanted:
        print(f"--- {name}", file=sys.stderr, flush=True)
        try:
            options = ["--rounds", str(args.rounds)] if args.rounds else []
            if name == "errors":
                data = errors.measured()
                data["environment"]["command"] = "python benchmarks/figures.py --only errors"
            else:
                data = measured(commands[name], options)
            data["environment"]["sources"] = digests()
            (args.out / f"{name}.json").write_text(written(data))
        except Exception:  # the others are measured all the same
            traceback.print_exc()
            failed.append(name)
    if failed:
        sys.exit(f"Not measured: {', '.join(failed)}.")


if __name__ == "__main__":
    main()
