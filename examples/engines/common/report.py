"""Tables of the results."""

from __future__ import annotations

from typing import Any


def table(title: str, names: list[str], rows: list[list[str]]) -> str:
    """Aligned columns: the first to the left, the others to the right."""
    widths = [max(len(str(row[i])) for row in [names, *rows]) for i in range(len(names))]
    lines = [title]
    for row in [names, *rows]:
        cells = [
            str(cell).rjust(width) if i else str(cell).ljust(width) for i, (cell, width) in enumerate(zip(row, widths))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def report(results: dict[str, Any]) -> str:
    """All tables of the results of a run."""
    parts = []
    checks: dict[str, Any] = {}
    for name, found in results["runs"].items():
        checks |= {f"{name}{step.removeprefix('check')}": found[step] for step in found if step.startswith("check")}
    checks = _by_mode(checks)
    if checks:
        parts.append(_checks(checks))
    speeds = {name: found["speed"] for name, found in results["runs"].items() if "speed" in found}
    if speeds:
        parts.append(_speeds(speeds))
    for name, found in results["runs"].items():
        for step, of in found.items():
            errors = {"": of["error"]} if "error" in of else of.get("errors", {})
            parts.extend(f"{name}, {step} {part}".rstrip() + f": FAILED\n  {text}" for part, text in errors.items())
    return "\n\n".join(parts)


def _by_mode(found: dict[str, Any]) -> dict[str, Any]:
    """Results by name, with those of each mode in place of a result that has "modes"."""
    parts: dict[str, Any] = {}
    for name, result in found.items():
        modes = result.get("modes")
        parts |= {name: result} if modes is None else {f"{name} {mode}": modes[mode] for mode in modes}
    return parts


def _checks(checks: dict[str, Any]) -> str:
    rows, notes = [], []
    for name, found in checks.items():
        if "error" in found:
            continue
        for kind in ("prefill", "decode"):
            of = found["logits"].get(kind)
            if of is None:
                continue
            figures = [of["baseline_rms"], of["rms"], of["control_rms"], of["baseline_max"], of["max"]]
            verdict = "ok" if of["ok"] else "TOO FAR" if of["control_ok"] else "CONTROL TOO CLOSE"
            cells = [name, kind, str(of["rows"]), f"{of['logits_rms']:.2f}", f"{of['ratio']:.2f}"]
            rows.append([*cells, *(f"{x:.1e}" for x in figures), verdict])
        if found["counts"]:
            notes.append(f"  {name}: " + ", ".join(f"{count} {what}" for what, count in found["counts"].items()))
        if found["missing"]:
            notes.append(f"  {name}: NOT COVERED: {', '.join(found['missing'])}")
    names = ["attention", "rows", "count", "|logits|", "ratio", "bf16 rms", "rms", "control", "bf16 max", "max", ""]
    title = "Logits: distance from transformers in float32, and that of transformers in bfloat16"
    return "\n".join([table(title, names, rows), *notes])


def _speeds(speeds: dict[str, Any]) -> str:
    rows, shares = [], []
    for name, found in speeds.items():
        if "error" in found:
            continue
        for label, bench in _by_mode({name: found["bench"]} if "bench" in found else {}).items():
            cells = [label, str(bench["sequences"]), f"{bench['seconds']:.2f}", f"{bench['tokens_per_second']:,.0f}"]
            rows.append([*cells, f"{bench['prompt_tokens']:,}", f"{bench['new_tokens']:,}"])
        for window, of in found.get("profile", {}).items():
            if of["share"] is None:
                continue
            step = [f"{of[key] / max(of['steps'], 1) / 1e3:.2f}" for key in ("kernels_us", "attention_us")]
            shares.append([name, window, str(of["steps"]), *step, f"{of['share']:.1%}", f"{of['busy']:.0%}"])
    names = ["attention", "sequences", "seconds", "tokens/s", "prompt tokens", "new tokens"]
    parts = [table("Throughput: new tokens per second, or prompt tokens where there are no new ones", names, rows)]
    parts = parts if rows else []
    if shares:
        names = ["attention", "window", "steps", "kernels ms/step", "attention ms/step", "share", "GPU busy"]
        parts.append(table("Share of attention in the time of all kernels", names, shares))
    return "\n\n".join(parts)
