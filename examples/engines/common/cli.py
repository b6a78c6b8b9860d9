"""The command line of the engine examples.

Every step runs in a process of its own: an engine takes most of the GPU's memory and never gives all of it back, and
each attention gets its own CUDA graphs. A child process is the same script with ``--child``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .models import PRESETS, Shape, describe, model_directory, shape_of, write_model
from .report import report

STEPS = ("check", "bench", "profile")
OURS = "ours"
Step = Callable[[argparse.Namespace, Path], dict[str, Any]]


def make_parser(
    description: str, others: Sequence[str], presets: Sequence[str], checkout: bool = True
) -> argparse.ArgumentParser:
    """The options that all engines have. ``others``: attentions to compare with. ``checkout``: of the engine, or else
    it is an installed package."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    if checkout:
        parser.add_argument("--engine", type=Path, required=True, help="checkout of the engine")
        parser.add_argument("--work", type=Path, default=Path("build/engines"), help="where models are written")
    parser.add_argument("--model", choices=presets, default="qwen3-0.6b", help="shape of the random model")
    parser.add_argument("--layers", type=positive, help="layers, in place of the preset's")
    parser.add_argument("--steps", type=_steps, default=list(STEPS), help="comma-separated: check, bench, profile")
    parser.add_argument("--against", action="append", choices=others, default=[], help="measure this, too; repeatable")
    parser.add_argument("--check-others", action="store_true", help="check the logits of --against, too")
    parser.add_argument("--sequences", type=positive, default=256, help="sequences of the benchmark")
    parser.add_argument("--profile-sequences", type=positive, default=128, help="sequences of the profile")
    parser.add_argument("--profile-length", type=positive, default=1024, help="prompt tokens of each")
    parser.add_argument("--profile-steps", type=positive, default=20, help="decode steps that are profiled")
    parser.add_argument(
        "--backend",
        choices=["engine", "auto", "fa2", "fa3"],
        default="auto",
        help="of this library: sets CUTLASS_KERNELS_FORCE_BACKEND; 'engine' is what the engine asks for",
    )
    parser.add_argument("--out", type=Path, help="file for all results, as JSON")
    parser.add_argument("--timeout", type=positive, default=600, help="seconds for each process")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # "model", "speed:<attention>", "check:<attention>:<part>"
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser


def run(parser: argparse.ArgumentParser, steps: dict[str, Step], family: str | None, script: str) -> int:
    """Runs an engine that is a checkout. ``steps``: what ``check`` and ``speed`` do. The exit code."""
    arguments = sys.argv[1:]
    args = parser.parse_args(arguments)
    shape = shape_of(args.model, family, args.layers)
    directory = model_directory(args.work.resolve(), args.model, shape)
    if args.child:
        return _child(args, steps, shape, directory)
    if not args.engine.is_dir():
        parser.error(f"--engine {args.engine} is no folder: fetch the engine as the README says.")
    results = _new_results(args, args.engine.resolve().name, commit_of(args.engine), shape)
    if not (directory / "model.safetensors").exists():
        written = _spawn(args, arguments, "model", script)
        if "error" in written:
            results["runs"][OURS] = {"model": written}
            print("\n" + report(results), flush=True)
            return _finish(args, results)
    _parent(args, arguments, results, script, [""])
    return _finish(args, results)


def run_package(parser: argparse.ArgumentParser, steps: dict[str, Step], script: str, name: str, version: str) -> int:
    """Runs an engine that is an installed package. ``check`` has a process for each of ``args.models``, so that one
    that fails leaves the others alone. The exit code."""
    arguments = sys.argv[1:]
    args = parser.parse_args(arguments)
    shape = shape_of(args.model, None, args.layers)
    if args.child:
        return _child(args, steps, shape, Path())
    results = _new_results(args, name, version, shape)
    _parent(args, arguments, results, script, args.models)
    return _finish(args, results)


def _new_results(args: argparse.Namespace, name: str, version: str, shape: Shape) -> dict[str, Any]:
    print(f"{name} at {version}, {args.model}: {shape}", flush=True)
    model = {"preset": args.model, **describe(shape)}
    return {"engine": version, "model": model, "backend": args.backend, "runs": {}}


def _finish(args: argparse.Namespace, results: dict[str, Any]) -> int:
    every = [step for found in results["runs"].values() for step in found.values()]
    results["ok"] = all("error" not in step and step.get("ok", True) for step in every)
    if len(every) > 1:
        print("\n=== all\n\n" + report(results), flush=True)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1))
        print(f"\nResults: {args.out}")
    print("ok" if results["ok"] else "FAILED")
    return 0 if results["ok"] else 1


def _parent(
    args: argparse.Namespace, arguments: list[str], results: dict[str, Any], script: str, parts: list[str]
) -> None:
    """Runs the children, and prints each one's report. ``results``: by attention and step."""
    for attention in [OURS, *args.against]:
        found = results["runs"].setdefault(attention, {})
        children: dict[str, str] = {}
        if "check" in args.steps and (attention == OURS or args.check_others):
            children |= {f"check {part}".rstrip(): f"check:{attention}:{part}" for part in parts}
        if {"bench", "profile"} & set(args.steps):
            children["speed"] = f"speed:{attention}"
        for step, child in children.items():
            found[step] = _spawn(args, arguments, child, script)
            print("\n" + report({"runs": {attention: {step: found[step]}}}), flush=True)


def _spawn(args: argparse.Namespace, arguments: list[str], child: str, script: str) -> dict[str, Any]:
    """Runs one child process and returns its result; ``{"error": ...}`` if it has none."""
    environment = dict(os.environ)
    if args.backend != "engine":
        environment["CUTLASS_KERNELS_FORCE_BACKEND"] = args.backend
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, script, *arguments, "--child", child, "--result", str(result)]
        print(f"\n=== {child}", flush=True)
        start = time.perf_counter()
        try:
            code = subprocess.run(command, env=environment, timeout=args.timeout, check=False).returncode
        except subprocess.TimeoutExpired:
            return {"error": f"{child} took more than {args.timeout} seconds (--timeout)."}
        print(f"=== {child}: {time.perf_counter() - start:.0f} seconds", flush=True)
        if not result.exists():
            return {"error": f"{child} ended with code {code} and no result."}
        return json.loads(result.read_text())


def _child(args: argparse.Namespace, steps: dict[str, Step], shape: Shape, directory: Path) -> int:
    """One step, whose result goes to a file."""
    import torch

    step, args.attention, args.part = [*args.child.split(":"), "", ""][:3]
    try:
        if step == "model":
            write_model(directory, shape, "cuda" if torch.cuda.is_available() else "cpu")
            found: dict[str, Any] = {}
        else:
            if args.attention == OURS:
                _refuse_fallbacks()
            found = {**steps[step](args, directory), **machine()}
    except Exception as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"}
    args.result.write_text(json.dumps(found))
    sys.stdout.flush()
    return 1 if "error" in found else 0


@contextmanager
def kept_errors(errors: dict[str, str], name: str) -> Iterator[None]:
    """Notes an exception among ``errors`` and goes on: the results of others are not lost."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        errors[name] = f"{type(error).__name__}: {error}"


def _refuse_fallbacks() -> None:
    """Makes a call that PyTorch would compute in place of a kernel an error."""
    import cutlass_kernels

    warnings.filterwarnings("error", category=cutlass_kernels.PerformanceWarning)


def machine() -> dict[str, str]:
    """The GPU and versions."""
    import torch

    import cutlass_kernels

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    version = getattr(cutlass_kernels, "__version__", "unknown")
    return {"gpu": gpu, "torch": torch.__version__, "cutlass_kernels": version}


def commit_of(checkout: Path) -> str:
    """The commit of a checkout, with a note where files differ from it."""
    try:
        git = ["git", "-C", str(checkout)]
        commit = subprocess.run([*git, "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "an unknown commit"
    return commit.stdout.strip() + (" with changes" if changes.stdout.strip() else "")


def presets_of(families: Sequence[str]) -> list[str]:
    """Presets whose family an engine has."""
    return [name for name, shape in PRESETS.items() if shape.family in families]


def positive(text: str) -> int:
    """The type of options that count something."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _steps(text: str) -> list[str]:
    steps = [step.strip() for step in text.split(",") if step.strip()]
    unknown = [step for step in steps if step not in STEPS]
    if unknown or not steps:
        raise argparse.ArgumentTypeError(f"{text!r}: steps are {', '.join(STEPS)}")
    return steps
