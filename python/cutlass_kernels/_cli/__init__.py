"""The command line. Nothing else in the package imports this, so the library itself needs neither typer nor rich."""

from __future__ import annotations

from typing import Annotated

import typer

import cutlass_kernels

from . import _check, _explain, _info

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("info")(_info.command)
app.command("check")(_check.command)
app.command("explain")(_explain.command)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"cutlass_kernels {cutlass_kernels.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Attention kernels for Ampere and Hopper GPUs: what is installed, whether it computes right, what would run."""
