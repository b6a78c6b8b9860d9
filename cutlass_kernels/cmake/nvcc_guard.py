"""Runs nvcc and judges what ptxas said about each kernel.

usage: nvcc_guard.py MAX_SPILL_BYTES VERSIONS [ccache] nvcc ARGUMENTS...      (with -Xptxas -v among the arguments)

Prints one line per kernel and GPU (registers, stack, spills) instead of ptxas's five, passes every other message on,
and fails the compilation, removing the object file, where a kernel would be correct but slow:

* warning C75xx: ptxas serialised wgmma instructions, which costs a Hopper kernel about half its speed;
* more than MAX_SPILL_BYTES of spill stores per thread: a few spilled loop invariants do no harm, spilled accumulators
  do.

VERSIONS, of the compiler and of the headers that are no dependencies, are not looked at: with them in the command,
objects of other versions are out of date.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ENTRY = re.compile(r"ptxas info\s*: Compiling entry function '(\w+)' for '(\w+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"ptxas info\s*: Used (\d+) registers")
SERIALISED = re.compile(r"\bC75\d\d\b")


def short_name(symbol: str) -> str:
    """`void cutlass_kernels::fa2::kernel<...>(Params)` becomes `fa2::kernel<...>`."""
    if shutil.which("c++filt"):
        done = subprocess.run(["c++filt", symbol], capture_output=True, text=True, check=False)
        symbol = done.stdout.strip() or symbol
    symbol = symbol.removeprefix("void ").replace("cutlass_kernels::", "").replace("(anonymous namespace)::", "")
    depth = 0
    for position, char in enumerate(symbol):
        depth += (char == "<") - (char == ">")
        if char == "(" and depth == 0:
            return symbol[:position]
    return symbol


def judge(stderr: str, max_spill: int) -> tuple[list[str], list[str]]:
    """The lines to show, and the reasons to fail."""
    shown: list[str] = []
    faults: list[str] = []
    kernel, gpu, memory, spill = "", "", "", 0
    in_function = False
    for line in stderr.splitlines():
        if match := ENTRY.search(line):
            kernel, gpu = short_name(match[1]), match[2]
            memory, spill, in_function = "", 0, True
        elif SERIALISED.search(line):
            faults.append(line.strip())
            shown.append(line)
        elif match := STACK.search(line):
            memory, spill = f"stack {match[1]} B, spills {match[2]}/{match[3]} B", int(match[2])
        elif (match := REGISTERS.search(line)) and in_function:
            shown.append(f"  {gpu:7} {match[1]:>3} registers, {memory}  {kernel}")
            if spill > max_spill:
                faults.append(f"{kernel} for {gpu} spills {spill} bytes (at most {max_spill} allowed)")
            in_function = False
        elif "ptxas info" not in line and line.strip():
            shown.append(line)
    return shown, faults


def main(max_spill: int, command: list[str]) -> int:
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    shown, faults = judge(done.stderr, max_spill)
    if shown:
        print("\n".join(shown), file=sys.stderr)
    if done.returncode == 0 and faults:
        output = Path(command[command.index("-o") + 1]) if "-o" in command else None
        print(f"error: {output or 'this unit'} compiles to a slow kernel:", file=sys.stderr)
        print("\n".join(f"  {fault}" for fault in faults), file=sys.stderr)
        if output is not None:
            output.unlink(missing_ok=True)
        return 1
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[3:]))
