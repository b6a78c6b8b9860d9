"""``python -m cutlass_kernels``: what is installed, whether it computes right, and which backend serves a request."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line, or says what it lacks."""
    try:
        from ._cli import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"the command line of cutlass_kernels needs {error.name}: install it with `pip install typer rich`.")
    app(prog_name="python -m cutlass_kernels")


if __name__ == "__main__":
    main()
