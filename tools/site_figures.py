"""Writes the figures of the pages from docs/data: tables and sentences between marks, and pictures.

    python benchmarks/figures.py           # on the GPU: measures, and writes docs/data
    python tools/site_figures.py

A block of a page begins with `<!-- figures: NAME -->` and ends with `<!-- end of figures -->`. Each says where and when
it was measured, and whether the sources of the kernels that it is about have changed since.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))
from charts import Chart, picture  # noqa: E402
from sources import digests  # noqa: E402

DATA, IMAGES = ROOT / "docs" / "data", ROOT / "docs" / "images"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(?<=<!-- figures: )([a-z0-9-]+)( -->\n).*?(?=<!-- end of figures -->)", re.DOTALL)
NAMES = {
    "flash_attn_3": "FlashAttention-3",
    "flash_attn_3_scheduled": "FlashAttention-3, scheduled",
    "cudnn": "cuDNN",
    "torch_fa2": "PyTorch's FlashAttention-2",
    "flashinfer_fa2": "FlashInfer (fa2)",
    "flashinfer_fa3": "FlashInfer (fa3)",
    "flashinfer_heads": "FlashInfer, a pattern per head",
    "flashinfer": "FlashInfer (CUDA cores)",
    "flashinfer_tc": "FlashInfer (tensor cores)",
    "flash_mla": "FlashMLA",
    "torch_add": "`torch.add`",
}


class Figures:
    """What a file of docs/data holds."""

    def __init__(self, name: str) -> None:
        data = json.loads((DATA / f"{name}.json").read_text())
        self.environment: dict[str, Any] = data["environment"]
        self.by_case: dict[tuple[str, str], dict[str, float]] = {}
        for result in data["results"]:
            case = self.by_case.setdefault((result["group"], result["column"]), {})
            case[result["backend"]] = result["figure"]

    def only(self, wanted: Callable[[str, str], bool]) -> Figures:
        """The cases whose group and column are ``wanted``."""
        some = copy.copy(self)
        some.by_case = {case: found for case, found in self.by_case.items() if wanted(*case)}
        return some

    @property
    def groups(self) -> list[str]:
        return list(dict.fromkeys(group for group, _ in self.by_case))

    @property
    def backends(self) -> list[str]:
        return list(dict.fromkeys(backend for case in self.by_case.values() for backend in case))

    def columns(self, groups: Iterable[str]) -> list[str]:
        wanted = set(groups)
        return list(dict.fromkeys(column for group, column in self.by_case if group in wanted))

    def figure(self, group: str, column: str, backend: str) -> float | None:
        return self.by_case.get((group, column), {}).get(backend)

    def ratio(self, case: tuple[str, str], ours: str, peers: Sequence[str], more_is_better: bool) -> float | None:
        """How many times as fast ours is as the fastest of the peers."""
        figures = self.by_case[case]
        found = [figures[peer] for peer in peers if peer in figures]
        if ours not in figures or not found:
            return None
        return figures[ours] / max(found) if more_is_better else min(found) / figures[ours]

    def ratios(self, ours: str, peers: Sequence[str], more_is_better: bool) -> list[float]:
        every = (self.ratio(case, ours, peers, more_is_better) for case in self.by_case)
        return [ratio for ratio in every if ratio is not None]

    def peers(self, of: Iterable[str]) -> list[str]:
        return [backend for backend in of if backend in self.backends]

    def name(self, backend: str) -> str:
        """Of a peer, and whose build it is, if not its authors'."""
        releases = self.environment.get("peers", {}).items()
        of_vllm = any(backend.startswith(columns) and release.endswith(" of vLLM") for columns, release in releases)
        return f"vLLM's {NAMES[backend]}" if of_vllm else NAMES[backend]


# --- texts -------------------------------------------------------------------------------------------------------


def shown(figure: float | None, digits: int = 3) -> str:
    """Of so many digits, but never fewer than those before the point."""
    if figure is None:
        return "-"
    places = max(0, digits - 1 - math.floor(math.log10(abs(figure)))) if figure else 0
    return f"{figure:.{places}f}"


def row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def lines_of(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join([row(header), "|" + "---|" * len(header), *map(row, rows)])


def grid(
    figures: Figures,
    unit: str,
    names: dict[str, str],
    ratio: tuple[str, str, Sequence[str]] | None = None,
    groups: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
) -> str:
    """Groups and backends down, columns across. ``names``: of backends, ours first. ``ratio``: name, ours, peers."""
    groups = figures.groups if groups is None else groups
    columns = figures.columns(groups) if columns is None else columns
    rows = []
    for group in groups:
        for backend, name in names.items():
            cells = [figures.figure(group, column, backend) for column in columns]
            if any(cell is not None for cell in cells):
                rows.append([group, name, *map(shown, cells)])
        if ratio is not None:
            what, ours, peers = ratio
            found = [figures.ratio((group, column), ours, peers, unit != "us") for column in columns]
            if any(x is not None for x in found):
                rows.append([group, what, *("-" if x is None else f"{x:.2f}" for x in found)])
    return lines_of([unit, "", *columns], rows)


def cases(figures: Figures, unit: str, names: dict[str, str], ours: str, peers: Sequence[str]) -> str:
    """A row per case, a column per backend, and how many times as fast ours is as the fastest peer."""
    present = {backend: name for backend, name in names.items() if backend in figures.backends}
    header = ["", "requests x keys", *(f"{name}, {unit}" for name in present.values())]
    header += ["fastest peer / ours" if unit == "us" else "ours / fastest peer"] if figures.peers(peers) else []
    rows = []
    for case, found in figures.by_case.items():
        cells = [*case, *(shown(found.get(backend)) for backend in present)]
        ratio = figures.ratio(case, ours, peers, unit != "us")
        rows.append([*cells, *(["-" if ratio is None else f"{ratio:.2f}"] if figures.peers(peers) else [])])
    return lines_of(header, rows)


def mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def summary(figures: Figures, ours: str, peers: Sequence[str], more_is_better: bool = True, name: str = "") -> str:
    """How ours compares with the fastest of the peers, over all cases; nothing where none of them was measured."""
    present, every = figures.peers(peers), figures.ratios(ours, peers, more_is_better)
    if not every:
        return ""
    behind = sum(round(ratio, 2) < 1 for ratio in every)
    of = listed([figures.name(p) for p in present])
    than = of if len(present) == 1 else f"the {'faster' if len(present) == 2 else 'fastest'} of {of}"
    slower = f"slower in {behind} of the {len(every)} cells" if behind else f"slower in none of the {len(every)} cells"
    return (
        f"{name or ours} is {min(every):.2f} to {max(every):.2f} times as fast as {than} (geometric mean "
        f"{mean(every):.2f}), {slower}."
    )


def caption(environment: dict[str, Any], folders: Iterable[str], backends: Sequence[str] = ()) -> str:
    """Where and when, and beside which releases of those ``backends`` that are peers."""
    now, then = digests(), environment.get("sources", {})
    changed = [folder for folder in folders if now.get(folder) != then.get(folder)]
    peers = [
        name
        for columns, name in environment.get("peers", {}).items()
        if any(backend.startswith(columns) for backend in backends)
    ]
    rounds = [f"{environment['settings']['rounds']} rounds"] if "settings" in environment else []
    facts = [environment["gpu"], f"torch {environment['torch']}", *peers, *rounds, environment["date"]]
    since = f" The sources of {listed(changed)} have changed since." if changed else ""
    return f"{', '.join(facts)}, commit {environment['commit']}.{since}"


# --- blocks ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """``data``: the files it is made from. ``folders``: the kernels it is about."""

    data: tuple[str, ...]
    folders: tuple[str, ...]
    text: Callable[..., str]

    def render(self) -> str:
        if missing := [name for name in self.data if not (DATA / f"{name}.json").exists()]:
            return f"(Not measured yet: {', '.join(missing)}.)"
        files = [Figures(name) for name in self.data]
        said = list(dict.fromkeys(caption(file.environment, self.folders, file.backends) for file in files))
        if len(said) > 1:
            said = [f"{name}: {text}" for name, text in zip(self.data, said)]
        return "\n\n".join(part for part in (self.text(*files), textwrap.fill(" ".join(said), 120)) if part)


def fill(*sentences: str) -> str:
    return textwrap.fill(" ".join(s for s in sentences if s), 120, break_long_words=False, break_on_hyphens=False)


FA3_PEERS, FA2_PEERS = ("flash_attn_3", "cudnn"), ("flashinfer_fa2", "torch_fa2")
DECODE_PEERS = ("flashinfer", "flashinfer_tc")
PLAN_FREE = {"attention": "**attention()**", "planned": "planned wrapper"}
LATENT_PEERS = ("flash_mla", "flashinfer_fa3", "flashinfer_fa2")


def prefill(ours: str, peers: Sequence[str], file: str) -> Callable[[Figures], str]:
    def text(figures: Figures) -> str:
        names = {ours: f"**{ours}**", **{p: figures.name(p) for p in peers}}
        told = summary(figures, ours, peers)
        table = grid(figures, "TFLOP/s", names, (f"{ours} / faster peer", ours, peers))
        return "\n\n".join([picture(file, f"Prefill: {ours} and its peers"), fill(told), table])

    return text


BANDWIDTH = ("32 x 4k", "64 x 4k", "128 x 2k", "64 x 8k")  # of decode: where the cache is all that counts


def readme(prefill_: Figures, decode_: Figures) -> str:
    return fill(
        summary(prefill_, "fa3", FA3_PEERS, name="On Hopper, prefill (fa3)"),
        summary(decode_, "auto", DECODE_PEERS, False, "Decode"),
        f"Decode reads the KV cache at {_bandwidth(decode_)} from 32 requests of 4k keys on.",
    )


def _bandwidth(figures: Figures) -> str:
    rates = [decode_rate(column, figures.by_case["32/8 hd128", column]["auto"], 8 * 128) for column in BANDWIDTH]
    return f"{min(rates):.1f} to {max(rates):.1f} TB/s"


def decode_rate(column: str, time: float, columns: int, parts: int = 2) -> float:
    """TB/s of a cache of 16 bits, of keys and values; ``columns`` of each token."""
    requests, keys = column.split(" x ")
    return int(requests) * int(keys.removesuffix("k")) * 1024 * columns * parts * 2 / time / 1e6


def decode(figures: Figures) -> str:
    names = {"auto": "**this library**", **{p: figures.name(p) for p in DECODE_PEERS}}
    table = grid(figures, "us", names, ("faster peer / ours", "auto", DECODE_PEERS), ["32/8 hd128"])
    told = summary(figures, "auto", DECODE_PEERS, False, "Over all heads and head dimensions measured, it")
    rate = f"From 32 x 4k on, that is {_bandwidth(figures)}."
    return "\n\n".join([picture("decode", "Decode in TB/s"), table, fill(rate, told)])


def plan_free(appends: bool, figures: Figures) -> str:
    """Of pages of 16 tokens: decode steps, or appends and mixtures."""
    of = figures.only(lambda group, column: group.endswith("page 16") and (" over " in column) == appends)
    peers = ("flash_attn_3", "flash_attn_3_scheduled")
    told = [summary(of, "attention", [peer], False, "`attention()`") for peer in peers]
    return "\n\n".join([grid(of, "us", PLAN_FREE | {p: figures.name(p) for p in peers}), fill(*told)])


def latent(figures: Figures) -> str:
    names = {"auto": "this library", **{p: figures.name(p) for p in LATENT_PEERS}}

    def of(varied: bool) -> str:
        some = figures.only(lambda _, column: column.endswith(("uniform", "log-normal")) == varied)
        return cases(some, "us", names, "auto", LATENT_PEERS)

    chart = picture("latent", "Latent attention in TB/s")
    return "\n\n".join([chart, of(False), "Requests whose lengths differ, 4k or 1k on average:", of(True)])


def latent_e4m3(e4m3: Figures, bf16: Figures) -> str:
    rows = []
    for (group, column), found in e4m3.by_case.items():
        other = bf16.figure(group, column, "auto")
        if other is not None and "auto" in found:
            rows.append([group, column, shown(found["auto"]), shown(other), f"{other / found['auto']:.2f}"])
    return lines_of(["", "requests x keys", "e4m3 cache, us", "bf16 cache, us", "bf16 / e4m3"], rows)


def fused(figures: Figures) -> str:
    every = [x["auto"] / x["contiguous"] for x in figures.by_case.values() if "contiguous" in x]
    return fill(
        f"`trtllm_fmha_v2_prefill` runs at {min(every):.2f} to {max(every):.2f} of fa3's speed on contiguous tensors, "
        f"in each of its layouts."
    )


def block_sparse(figures: Figures) -> str:
    rows = []
    for group in figures.groups:
        dense = figures.figure(group, "100%", "dense")
        for backend, note in (("blocks", ""), ("heads", ", a pattern per head")):
            cells = [figures.figure(group, column, backend) for column in ("10%", "25%", "50%")]
            if dense is not None and all(cells):
                rows.append([group + note, *(f"{dense / cell:.2f}" for cell in cells if cell)])
    peers = ("flashinfer_fa3", "flashinfer_heads")
    told = [summary(figures, ours, [peer]) for ours, peer in zip(("blocks", "heads"), peers)]
    return "\n\n".join(part for part in (lines_of(["", "10 %", "25 %", "50 %"], rows), fill(*told)) if part)


def host(figures: Figures) -> str:
    names = {"auto": "this library", "torch_fa2": figures.name("torch_fa2"), "flashinfer_fa3": "FlashInfer"}
    present = {backend: name for backend, name in names.items() if backend in figures.backends}
    add = statistics.median(x["torch_add"] for x in figures.by_case.values() if "torch_add" in x)
    rows = []
    for (_, column), found in figures.by_case.items():
        cells = [f"{found[b]:.1f}" if b in found else "-" for b in present]
        call = f"`{column}`" if re.fullmatch(r"\w+_\w+", column) else column
        rows.append([call, *cells, f"{found['auto'] / found['torch_add']:.1f}" if "torch_add" in found else "-"])
    header = ["us", *present.values(), "in times of `torch.add`"]
    return "\n\n".join(
        [lines_of(header, rows), f"`torch.add` of 16 numbers took {add:.1f} us, the median beside these calls."]
    )


def fp8(figures: Figures) -> str:
    return grid(figures, "TFLOP/s", {"fa3": "**fa3**", "flash_attn_3": figures.name("flash_attn_3")})


def errors(figures: Figures) -> str:
    rows = []
    for group in figures.groups:
        for kind in ("error", "bias", "LSE"):
            cells = [figures.figure(group, column, kind) for column in figures.columns([group])]
            name = {"error": "error (RMS)", "bias": "bias", "LSE": "LSE, largest error"}[kind]
            rows.append([group, name, *map(_error, cells)])
    return lines_of(["", "", *figures.columns(figures.groups)], rows)


def _error(figure: float | None) -> str:
    if figure is None:
        return "-"
    return f"{figure:.1g}" if abs(figure) < 1e-4 else f"{figure:.4f}"


COMMON = ("common", "plan", "schedule", "merge", "others")
BLOCKS = {
    "summary": Block(("prefill", "decode"), ("fa3", "fa2", *COMMON), readme),
    "prefill-fa3": Block(("prefill",), ("fa3", *COMMON), prefill("fa3", FA3_PEERS, "speed")),
    "prefill-fa2": Block(("prefill-fa2",), ("fa2", *COMMON), prefill("fa2", FA2_PEERS, "speed-fa2")),
    "fp8": Block(("fp8",), ("fa3", *COMMON), fp8),
    "errors": Block(("errors",), ("fa3", "fa2", *COMMON), errors),
    "decode": Block(("decode",), ("fa2", *COMMON), decode),
    "plan-free": Block(("plan-free",), ("fa2", "fa3", *COMMON), functools.partial(plan_free, False)),
    "appends": Block(("plan-free",), ("fa2", "fa3", *COMMON), functools.partial(plan_free, True)),
    "fused": Block(("fused",), ("fmha_v2", "fa3", *COMMON), fused),
    "latent": Block(("latent",), ("latent", "fa2", "fa3", *COMMON), latent),
    "latent-e4m3": Block(("latent-e4m3", "latent"), ("latent", "fa2", "fa3", *COMMON), latent_e4m3),
    "block-sparse": Block(("block-sparse",), ("fa3", *COMMON), block_sparse),
    "host": Block(("host",), (), host),
}


# --- charts ------------------------------------------------------------------------------------------------------


def speed_chart(ours: str, peers: Sequence[str], figures: Figures) -> Chart:
    names = {ours: f"cutlass_kernels ({ours})", **{p: figures.name(p) for p in figures.peers(peers)}}
    panels = {}
    for mask in ("causal", "full"):
        for dim in ("hd64", "hd128", "hd256"):
            group = f"{dim} {mask}"
            columns = figures.columns([group])
            panels[f"head dim {dim[2:]}, {mask}"] = {c: _of(names, figures.by_case[group, c]) for c in columns}
    text = f"TFLOP/s by sequence length. bfloat16, 16k tokens in all. {_where(figures)}."
    return Chart(names, panels, (3, 1), text, f"Prefill in TFLOP/s: {', '.join(names.values())}")


def decode_chart(figures: Figures) -> Chart:
    names = {"auto": "cutlass_kernels", **{p: figures.name(p) for p in figures.peers(DECODE_PEERS)}}
    panels: dict[str, dict[str, dict[str, float]]] = {"one request": {}, "8 to 32 requests": {}, "64 and more": {}}
    for column in figures.columns(["32/8 hd128"]):
        requests = int(column.split(" ")[0])
        title = "one request" if requests == 1 else "8 to 32 requests" if requests <= 32 else "64 and more"
        found = _of(names, figures.by_case["32/8 hd128", column])
        panels[title][column] = {name: decode_rate(column, time, 8 * 128) for name, time in found.items()}
    text = f"TB/s of the KV cache, by requests x keys. bfloat16, 32/8 heads of 128, pages of 16. {_where(figures)}."
    return Chart(names, panels, (3, 1), text, f"Decode in TB/s: {', '.join(names.values())}")


def latent_chart(figures: Figures) -> Chart:
    names = {"auto": "cutlass_kernels", **{p: figures.name(p) for p in figures.peers(LATENT_PEERS)}}
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for (group, column), case in figures.by_case.items():
        if re.fullmatch(r"\d+ x \d+k", column):
            rates = {name: decode_rate(column, time, 576, parts=1) for name, time in _of(names, case).items()}
            panels.setdefault(group, {})[column] = rates
    text = f"TB/s of the latent cache, by requests x keys. bfloat16, pages of 64. {_where(figures)}."
    return Chart(names, panels, (4, 1), text, f"Latent attention in TB/s: {', '.join(names.values())}")


def _of(names: dict[str, str], case: dict[str, float]) -> dict[str, float]:
    return {name: figure for name, figure in case.items() if name in names}


def _where(figures: Figures) -> str:
    facts = figures.environment
    return f"{facts['gpu']}, {facts['date']}, commit {facts['commit']}"


CHARTS: dict[str, tuple[str, Callable[[Figures], Chart]]] = {
    "speed": ("prefill", functools.partial(speed_chart, "fa3", FA3_PEERS)),
    "speed-fa2": ("prefill-fa2", functools.partial(speed_chart, "fa2", FA2_PEERS)),
    "decode": ("decode", decode_chart),
    "latent": ("latent", latent_chart),
}


def update(page: str) -> str:
    """The page with its blocks made anew."""
    return BLOCK.sub(lambda m: f"{m[1]}{m[2]}{BLOCKS[m[1]].render()}\n", page)


def files() -> dict[Path, str]:
    """Everything that this script writes."""
    found = {path: update(path.read_text()) for path in PAGES}
    for file, (data, chart) in CHARTS.items():
        if (DATA / f"{data}.json").exists():
            made = chart(Figures(data))
            found |= {
                IMAGES / f"{file}{'-narrow' if narrow else ''}.svg": made.draw(narrow) for narrow in (False, True)
            }
    return found


if __name__ == "__main__":
    for path, text in files().items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"wrote {path.relative_to(ROOT)}")
