"""Tests the plug-ins for serving engines against the real packages, in virtual environments of its own.

    python tools/test_plugins.py [vllm] [sglang] [--venvs build/plug-ins]

Installs the releases that the extras of pyproject.toml pin, with all that they need (about 10 GB per engine, and ten
minutes; an environment that is there is used again), and runs the tests of each engine: about a minute, without a GPU.
Where a package cannot be installed, it says "skipped:" with pip's reason and succeeds; a failing test fails it.

    CK_PLUGINS_PYTHON   interpreter to use (this one); SGLang's wheel is for CPython 3.11
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = {"vllm": "tests/engines/test_vllm_plugin.py", "sglang": "tests/engines/test_sglang_plugin.py"}
NEEDED = ["pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "numpy"]


def pinned(engine: str) -> str:
    """What the extra of an engine asks for, as in ``vllm==0.33.*``."""
    (found,) = re.findall(rf'^{engine} = \["([^"]+)"\]$', (ROOT / "pyproject.toml").read_text(), re.M)
    return found


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | environment
    return subprocess.run(command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def install(engine: str, venv: Path) -> str | None:
    """An environment with the engine; the reason where there is none."""
    python = venv / "bin" / "python"
    if not python.exists():
        made = run(os.environ.get("CK_PLUGINS_PYTHON", sys.executable), "-m", "venv", str(venv))
        if made.returncode:
            return made.stdout.strip()
    wanted = pinned(engine)
    done = run(str(python), "-m", "pip", "install", "--quiet", wanted, *NEEDED)
    if done.returncode == 0:
        return None
    errors = [line for line in done.stdout.splitlines() if line.startswith("ERROR")]
    return f"{wanted} cannot be installed: {' '.join(errors) or done.stdout.strip()[-500:]}"


def test(engine: str, venv: Path) -> bool:
    """Runs the tests of an engine on the sources; prints pytest's report."""
    python = str(venv / "bin" / "python")
    paths = f"{ROOT / 'python'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    if run(python, "-c", "import cutlass_kernels", PYTHONPATH=paths).returncode:
        # The sources hold no compiled module: the installed package has one.
        paths = os.environ.get("PYTHONPATH", "")
        done = run(python, "-m", "pip", "install", "--quiet", "--no-deps", ".")
        if done.returncode:
            print(done.stdout)
            return False
    done = run(python, "-m", "pytest", "-q", "-rs", "tests/engines/test_plug_ins.py", TESTS[engine], PYTHONPATH=paths)
    print(done.stdout)
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="*", choices=[[], *TESTS], help="default: all")
    parser.add_argument("--venvs", type=Path, default=ROOT / "build" / "plug-ins")
    arguments = parser.parse_args()
    passed = True
    for engine in arguments.engines or TESTS:
        venv = (arguments.venvs / engine).absolute()
        reason = install(engine, venv)
        if reason is not None:
            print(f"skipped: {engine}: {reason}")
            continue
        print(f"=== {pinned(engine)}")
        passed &= test(engine, venv)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
