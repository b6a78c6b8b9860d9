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
    checks = {name: found["check"] for name, found in results["runs"].items() if "check" in found}
    if checks:
        parts.append(_checks(checks))
    speeds = {name: found["speed"] for name, found in results["runs"].items() if "speed" in found}
    if speeds:
        parts.append(_speeds(speeds))
    parts.extend(
        f"{name}, {step}: FAILED\n  {found[step]['error']}"
        for name, found in results["runs"].items()
        for step in found
        if "error" in found[step]
    )
    return "\n\n".join(parts)


def _checks(checks: dict[str, Any]) -> str:
    rows, notes = [], []
    for name, found in checks.items():
        if "error" in found:
            continue
        for kind in ("prefill", "decode"):
            of = found["logits"][kind]
            figures = [of["baseline_rms"], of["rms"], of["control_rms"], of["baseline_max"], of["max"]]
            verdict = "ok" if of["ok"] else "TOO FAR" if of["control_ok"] else "CONTROL TOO CLOSE"
            cells = [name, kind, str(of["rows"]), f"{of['logits_rms']:.2f}", f"{of['ratio']:.2f}"]
            rows.append([*cells, *(f"{x:.1e}" for x in figures), verdict])
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
        if bench := found.get("bench"):
            cells = [name, str(bench["sequences"]), f"{bench['seconds']:.2f}", f"{bench['tokens_per_second']:,.0f}"]
            rows.append([*cells, f"{bench['prompt_tokens']:,}", f"{bench['new_tokens']:,}"])
        for window in ("prefill", "decode"):
            of = found.get("profile", {}).get(window)
            if of is None or of["share"] is None:
                continue
            step = [f"{of[key] / max(of['steps'], 1) / 1e3:.2f}" for key in ("kernels_us", "attention_us")]
            shares.append([name, window, str(of["steps"]), *step, f"{of['share']:.1%}", f"{of['busy']:.0%}"])
    names = ["attention", "sequences", "seconds", "new tokens/s", "prompt tokens", "new tokens"]
    parts = [table("Throughput of the engine's own benchmark", names, rows)] if rows else []
    if shares:
        names = ["attention", "window", "steps", "kernels ms/step", "attention ms/step", "share", "GPU busy"]
        parts.append(table("Share of attention in the time of all kernels", names, shares))
    return "\n\n".join(parts)
