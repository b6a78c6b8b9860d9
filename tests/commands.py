"""Commands as users type them: Python in a process of its own, and the command lines in this one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any


def python(
    *arguments: str | Path, code: int = 0, cwd: Path | None = None, timeout: float | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs ``python`` with these arguments, which must exit with ``code``."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
        env={**os.environ, **environment},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def invoke(app: Any, *arguments: str, code: int = 0) -> str:
    """The output of a command line of typer, which must exit with ``code``."""
    from typer.testing import CliRunner

    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == code, result.output
    return result.output


def words(text: str) -> str:
    """``text`` without the frames and line ends that depend on the width of the terminal."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())
