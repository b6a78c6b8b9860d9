"""The command line. Nothing else in the package imports this, so the library itself needs neither typer nor rich."""

from __future__ import annotations

import typer

from . import _check, _explain, _info

app = typer.Typer(
    help="Attention kernels for Ampere and Hopper GPUs: what is installed, whether it computes right, what would run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("info")(_info.command)
app.command("check")(_check.command)
app.command("explain")(_explain.command)
