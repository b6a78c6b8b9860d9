"""The support matrix of the documentation, rendered from the table of kernels.

    python tools/support_matrix.py                       the matrix of this installation
    python tools/support_matrix.py --update docs/backends.md    rewrites the one of that page, from instances.cmake

The page shows what the default build compiles, so it follows ``instances.cmake``; an installation may have less.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cutlass_kernels import list_kernels
from cutlass_kernels._compute import half_precision

BEGIN, END = "<!-- matrix:begin -->", "<!-- matrix:end -->"
INSTANCES = Path("cutlass_kernels") / "instances.cmake"

# Features in the order of the rows. A feature that is not named here gets a row under its own name.
ROWS = {
    "interval_mask": "masks: full, causal, sliding window, chunked causal",
    "general_mask": "masks: windows to the right, chunks that are not causal, keys spread over ranks",
    "soft_cap": "`logits_soft_cap`",
    "sinks": "attention sinks",
    "ragged_kv": "batches of unequal lengths, NHD and HND, any strides of tokens and heads",
    "paged_kv": "paged KV cache",
    "bit_mask": "custom masks, multi-item scoring",
    "alibi": "ALiBi (`pos_encoding_mode`)",
    "device_scales": "scales of q, k and v in tensors, also one per head",
    "stats": "softmax statistics (`save_softmax_stats`)",
    "rope": "rotary embedding (`pos_encoding_mode`), applied to copies of q and k",
    "fp8": "fp8 queries, keys and values, converted into 16-bit copies where no kernel reads them",
    "e4m3_output": "e4m3 outputs of e4m3 queries, converted from 16-bit ones where no kernel writes them",
}
LATENT = (576, 512)  # values are columns of the keys
LATENT_TEXT = (
    "; 576/512, and 512/512 by `kv_indices_per_token`, where v is the first columns of k (latent attention), without "
    "custom masks"
)
# Elements of rows of which each stands for several, as in add_instances.cmake.
TYPES = {
    "16bit": ("float16", "bfloat16"),
    "latent_528": ("latent_v32_nope", "latent_v41_by_page", "latent_v41_by_token"),
}
TOKENS = {"latent_v32": "tokens of 656 bytes", "latent_v4": "of 584 bytes"}
TOKENS |= dict.fromkeys(TYPES["latent_528"], "of 528 bytes (quantized latent caches)")
_INSTANCE = re.compile(r"^ck_instance\((?P<words>[^)]*)\)", re.MULTILINE)


def parse_instances(text: str) -> list[dict[str, Any]]:
    """The rows of instances.cmake in the form of ``list_kernels()``."""
    kernels = []
    for match in _INSTANCE.finditer(text):
        backend, dtypes, qk, vo, least, most, *features = match["words"].partition(" TEMPLATE ")[0].split()
        dims = qk if qk == vo else f"{qk}_{vo}"
        element, _, kv_dtype = dtypes.partition("/")
        kernels += [
            {
                "name": "_".join(filter(None, (backend, dtype, of_keys, f"hd{dims}"))),
                "backend": backend,
                "q_dtype": dtype,
                "kv_dtype": of_keys or dtype,
                "head_dim_qk": int(qk),
                "head_dim_vo": int(vo),
                "features": features,
                "min_compute_capability": int(least),
                "max_compute_capability": int(most),
            }
            for dtype in TYPES.get(element, (element,))
            for of_keys in TYPES.get(kv_dtype, (kv_dtype,))
        ]
    return kernels


def render(kernels: list[dict[str, Any]]) -> str:
    """The matrix as a Markdown table: a column per backend, the reference last."""
    columns = []
    for backend in dict.fromkeys(kernel["backend"] for kernel in kernels):
        columns.append(_column(backend, [kernel for kernel in kernels if kernel["backend"] == backend]))
    reference = {
        "backend": "reference",
        "runs on": "any device of PyTorch",
        "element types": "float16, bfloat16, float32, float64, fp8 (e4m3, e5m2)",
        "head dimensions": "any",
        "served": set(ROWS) | {feature for column in columns for feature in column["served"]},
    }
    columns.append(reference)
    names = dict.fromkeys([*ROWS, *sorted(reference["served"])])
    lines = [_line(["", *(f"**{column['backend']}**" for column in columns)]), "|---" * (len(columns) + 1) + "|"]
    lines += [
        _line([fact, *(column[fact] for column in columns)]) for fact in ("runs on", "element types", "head dimensions")
    ]
    lines += [
        _line([ROWS.get(name, f"`{name}`"), *("yes" if name in column["served"] else "-" for column in columns)])
        for name in names
    ]
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _column(backend: str, kernels: list[dict[str, Any]]) -> dict[str, Any]:
    """What the kernels of one backend have in common; a feature counts if all of them have it.

    What kernels of fp8 lack, those of 16 bits compute from copies. Those of latent attention serve masks of intervals,
    and those of quantized latent caches none.
    """
    types = ", ".join(dict.fromkeys(k["q_dtype"] for k in kernels))
    narrow = [k["kv_dtype"] for k in kernels if k["kv_dtype"] != k["q_dtype"]]
    if narrow:
        types += f"; keys and values also {', '.join(dict.fromkeys(TOKENS.get(x, x) for x in narrow))}"
    separate = [
        kernel
        for kernel in kernels
        if (kernel["head_dim_qk"], kernel["head_dim_vo"]) != LATENT and kernel["kv_dtype"] not in TOKENS
    ]
    wide = [kernel for kernel in separate if not kernel["kv_dtype"].startswith("float8")]
    dims = dict.fromkeys((k["head_dim_qk"], k["head_dim_vo"]) for k in kernels)
    dim_names = ", ".join(str(qk) if qk == vo else f"{qk}/{vo}" for qk, vo in dims if (qk, vo) != LATENT)
    largest = max((kernel["head_dim_qk"] for kernel in separate), default=0)
    padding = f"; other multiples of 8 below {largest} are zero-padded" + (LATENT_TEXT if LATENT in dims else "")
    copied = set(half_precision.SERVED)
    return {
        "backend": backend,
        "runs on": _devices(kernels),
        "element types": types,
        "head dimensions": dim_names + padding,
        "served": set.intersection(*(set(kernel["features"]) for kernel in wide or separate or kernels)) | copied,
    }


def _devices(kernels: list[dict[str, Any]]) -> str:
    least = min(kernel["min_compute_capability"] for kernel in kernels)
    tops = [kernel["max_compute_capability"] for kernel in kernels]
    if 0 in tops:
        return f"CUDA, compute capability {_version(least)} and newer"
    most = max(tops)
    return f"CUDA, compute capability {_version(least)}" + (f" to {_version(most)}" if most > least else "")


def _version(capability: int) -> str:
    return f"{capability // 10}.{capability % 10}"


def update(readme: str, matrix: str) -> str:
    """``readme`` with ``matrix`` between the markers.

    Raises:
        ValueError: the markers are missing.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"there is no '{BEGIN}' followed by '{END}': put the two where the matrix belongs.")
    return f"{before}{begin}\n{matrix}{end}{after}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="the support matrix")
    parser.add_argument("--update", type=Path, metavar="PAGE", help="rewrite the matrix in this file")
    chosen = parser.parse_args(arguments)
    if chosen.update is None:
        print(render(list_kernels()), end="")
        return
    above = [folder / INSTANCES for folder in chosen.update.resolve().parents]
    instances = next((path for path in above if path.is_file()), above[0])
    text = update(chosen.update.read_text(), render(parse_instances(instances.read_text())))
    chosen.update.write_text(text)


if __name__ == "__main__":
    main()
