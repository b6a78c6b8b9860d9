"""``python -m cutlass_kernels``: what is installed, whether it computes right, and which backend serves a request."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line, or says which packages it needs."""
    try:
        from ._cli import app
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("typer", "rich"):
            raise
        sys.exit(
            f"The command line needs {package}, which is not installed: `pip install typer rich` installs "
            "what the extra cutlass_kernels[cli] names."
        )
    app(prog_name="python -m cutlass_kernels")


if __name__ == "__main__":
    main()
