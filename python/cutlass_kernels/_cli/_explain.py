"""``explain``: the backend a request would get, and the reasons against the others."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

import cutlass_kernels

from .._compute import request_facts, selection
from .._core import native


def command(
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, ...; a CUDA device if there is one or a capability is given.")
    ] = None,
    compute_capability: Annotated[
        str | None, typer.Option("--compute-capability", "--cc", help="A GPU that need not be here: 90 or 9.0.")
    ] = None,
    q_dtype: Annotated[str, typer.Option("--q-dtype", "--dtype", help="fp16, bf16, float8_e4m3fn, ...")] = "fp16",
    kv_dtype: Annotated[str | None, typer.Option(help="Default: that of the queries.")] = None,
    o_dtype: Annotated[str | None, typer.Option(help="Default: that of the queries (bfloat16 for fp8).")] = None,
    heads: Annotated[int, typer.Option("--heads", "--qo-heads", help="Query heads.")] = 32,
    kv_heads: Annotated[int | None, typer.Option(help="Key/value heads. Default: as many as query heads.")] = None,
    head_dim: Annotated[int, typer.Option("--head-dim", "--head-dim-qk", help="Dimension of queries and keys.")] = 128,
    head_dim_vo: Annotated[int | None, typer.Option(help="Dimension of values. Default: that of the keys.")] = None,
    feature: Annotated[
        list[str] | None, typer.Option("--feature", "-f", help="Repeat or separate by commas; --features lists them.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Requests, with --qo-len. Default: 1.")] = None,
    qo_len: Annotated[
        int | None, typer.Option(help="Query rows of each: compares tiles that may compute them.")
    ] = None,
    kv_len: Annotated[int | None, typer.Option(help="Keys of each. Default: as many as rows.")] = None,
    list_features: Annotated[bool, typer.Option("--features", help="Print what features there are.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say which backend would compute an attention, in which tiles, and why not the others.

    Example: python -m cutlass_kernels explain --cc 90 --dtype bf16 --kv-heads 8 -f causal --qo-len 512 --kv-len 8192
    """
    if list_features:
        for name, meaning in request_facts.FEATURES.items():
            typer.echo(f"{name:16} {meaning}")
        return
    features = [name.strip() for item in feature or [] for name in item.split(",") if name.strip()]
    try:
        explained = cutlass_kernels.explain(
            device=device,
            compute_capability=_capability(compute_capability),
            q_dtype=q_dtype,
            kv_dtype=kv_dtype,
            o_dtype=o_dtype,
            num_qo_heads=heads,
            num_kv_heads=kv_heads,
            head_dim_qk=head_dim,
            head_dim_vo=head_dim_vo,
            features=features,
            batch_size=batch_size,
            qo_len=qo_len,
            kv_len=kv_len,
        )
    except (ValueError, RuntimeError) as error:
        raise typer.BadParameter(str(error).replace("compute_capability", "--compute-capability")) from None
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "request": str(explained.request),
                    "selected": explained.selected,
                    "reasons": explained.reasons,
                    "candidates": [asdict(candidate) for candidate in explained.candidates],
                    "environment": selection.environment.shown(),
                },
                indent=2,
            )
        )
        return
    console = Console(soft_wrap=True)
    console.print(f"[bold]{escape(str(explained.request))}[/]", highlight=False)
    for backend in selection.BACKENDS:
        against = explained.reasons[backend]
        if backend == explained.selected:
            mark = "[bold green]selected[/]"
            if explained.is_before_others:
                mark += f", {selection.why_first(explained.request)}"
        else:
            mark = "[yellow]cannot serve[/]" if against else "can serve"
        console.print(f"  {backend}: {mark}", highlight=False)
        lines = [str(c) for c in explained.candidates] if backend == explained.selected else against
        for line in lines:
            console.print(f"    - {escape(line)}", highlight=False)
    if explained.selected in selection.KERNEL_BACKENDS and not has_machine_code(explained.request.compute_capability):
        console.print(
            "This build has no machine code for such a GPU: at the first use, the driver compiles PTX, for minutes, "
            "and keeps the result in its cache.",
            highlight=False,
        )
    for name, word in selection.environment.shown().items():
        what = "backend='auto'" if name == selection.VARIABLES[0] else "every backend"
        console.print(f"{name}={word} is set: it replaces {what}.", highlight=False, markup=False)


def has_machine_code(capability: int | None) -> bool:
    """Whether the kernels of this build run as they are on a GPU of 10 * major + minor."""
    assert native._C is not None and capability is not None
    return any(code // 10 == capability // 10 and code <= capability for code in native._C.machine_codes)


def _capability(text: str | None) -> int | None:
    """ "90", "9.0" and "sm_90" as 90."""
    if text is None:
        return None
    digits = text.lower().removeprefix("sm_").removesuffix("a").replace(".", "")
    if not digits.isdigit() or int(digits) < 10:
        raise typer.BadParameter(f"--compute-capability {text}: write it as 90 or 9.0.")
    return int(digits)
