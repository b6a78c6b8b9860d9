"""What the README and the pages of docs/ say is so: the matrix, the examples, the build options, the links."""

from __future__ import annotations

import re
from pathlib import Path

import compilers
import pytest
import support_matrix
from commands import python
from paths import ROOT

import cutlass_kernels

README = (ROOT / "README.md").read_text()
DOCS = ROOT / "docs"
PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "third_party/README.md"]
for folder in (DOCS, ROOT / "benchmarks" / "results"):
    PAGES += sorted(str(path.relative_to(ROOT)) for path in folder.rglob("*.md"))
INSTANCES = (ROOT / support_matrix.INSTANCES).read_text()


def blocks(language: str, page: str = "README.md") -> list[str]:
    text = (ROOT / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_matrix_is_up_to_date() -> None:
    kernels = support_matrix.parse_instances(INSTANCES)
    page = (DOCS / "backends.md").read_text()
    assert support_matrix.update(page, support_matrix.render(kernels)) == page, (
        "run `python tools/support_matrix.py --update docs/backends.md`"
    )


def test_names_of_flashinfer() -> None:
    """The table says of each name whether it is here."""
    table = (DOCS / "migrate" / "flashinfer.md").read_text().split("names:begin -->\n")[1].split("<!--")[0]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]
    said = {name.strip("`"): word for name, word, _ in rows}
    assert set(said.values()) == {"same", "differs", "missing", "raises"}
    for name, word in said.items():
        assert hasattr(cutlass_kernels, name) == (word != "missing"), name
        if word == "raises":
            with pytest.raises(NotImplementedError, match=name):
                getattr(cutlass_kernels, name)()
    ours = {"explain", "list_kernels", "fmha_v2_stats_to_lse", "BackendError", "PerformanceWarning", "__version__"}
    # vLLM's reshape_and_cache_flash, alone and behind its rotary_embedding
    ours |= {"append_paged_kv_cache_by_slot", "rope_append_paged_kv_cache_by_slot"}
    ours |= {"attention", "Schedule"}  # FlashAttention-3's interface
    modules = {"cascade", "decode", "mla", "page", "pod", "prefill", "quantization", "rope", "sparse", "utils"}
    assert set(cutlass_kernels.__all__) - ours - modules == {
        name for name, word in said.items() if word in ("same", "differs")
    }


def test_update_rewrites_a_file(tmp_path: Path) -> None:
    (tmp_path / "cutlass_kernels").mkdir()
    (tmp_path / "cutlass_kernels" / "instances.cmake").write_text(INSTANCES)
    stale = tmp_path / "README.md"
    stale.write_text(f"before\n{support_matrix.BEGIN}\nold\n{support_matrix.END}\nafter\n")
    support_matrix.main(["--update", str(stale)])
    text = stale.read_text()
    assert text.startswith(f"before\n{support_matrix.BEGIN}\n| ")
    assert text.endswith(f"|\n{support_matrix.END}\nafter\n")
    assert "old" not in text
    with pytest.raises(ValueError, match="put the two"):
        support_matrix.update("no markers", "")


def test_instances_and_registry_have_the_same_form() -> None:
    parsed = support_matrix.parse_instances(INSTANCES)
    rows = re.findall(r"^ck_instance\(\S+ +(\S+)", INSTANCES, re.MULTILINE)
    assert len(parsed) == len(rows) + sum("16bit" in x for x in rows) + 2 * sum("latent_528" in x for x in rows)
    known = {kernel["name"]: kernel for kernel in parsed}
    for kernel in cutlass_kernels.list_kernels():  # an installation may have been built with less, never with more
        row = known[kernel["name"]]
        assert kernel.keys() == row.keys()
        for key in ("backend", "q_dtype", "kv_dtype", "head_dim_qk", "head_dim_vo"):
            assert kernel[key] == row[key]
        assert set(kernel["features"]) == set(row["features"])


def test_matrix_of_other_kernels() -> None:
    text = """
    # ck_instance(fa9 float16 8 8 80 0 sinks)
ck_instance(fa3 bfloat16 192 128 90 90 interval_mask telepathy)
ck_instance(fa3 float16  64  64  90 90 interval_mask telepathy sinks)
"""
    matrix = support_matrix.render(support_matrix.parse_instances(text))
    assert "| runs on | CUDA, compute capability 9.0 | any device of PyTorch |" in matrix
    assert "| element types | bfloat16, float16 |" in matrix
    assert "| head dimensions | 192/128, 64; other" in matrix
    assert "| `telepathy` | yes | yes |" in matrix
    assert "| attention sinks | - | yes |" in matrix  # one of them lacks sinks
    assert "fa9" not in matrix


def test_matrix_without_kernels_is_that_of_the_reference() -> None:
    assert support_matrix.render([]).splitlines()[0] == "|  | **reference** |"


def test_readme_is_two_screens() -> None:
    assert len(README.splitlines()) <= 100


@pytest.mark.parametrize("page", [page for page in PAGES if blocks("python", page)])
def test_python_examples_run(page: str) -> None:
    program = "\n".join(blocks("python", page))
    if page == "README.md":
        program += "\nassert out.shape == (128, 32, 128) and lse.shape == (128, 32)\n"
    if "transformers" in program:
        pytest.importorskip("transformers", reason="the example needs pip install '.[hf]'")
    done = python("-c", program, cwd=ROOT)
    assert page != "README.md" or "selected" in done.stdout


def test_the_cpp_page_has_examples() -> None:
    assert len(blocks("cpp", "docs/cpp.md")) >= 4


@pytest.mark.parametrize("number", range(len(blocks("cpp", "docs/cpp.md"))))
def test_cpp_example_compiles(tmp_path: Path, number: int) -> None:
    source, headers = tmp_path / "example.cpp", ROOT / "cutlass_kernels" / "include"
    source.write_text(blocks("cpp", "docs/cpp.md")[number])
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{headers}"]
    if "<cuda_runtime_api.h>" in source.read_text():
        flags.append(f"-isystem{compilers.cuda_headers()}")
    compilers.run(compilers.host_compiler(), *flags, source)


def test_build_options_are_those_of_cmake() -> None:
    stated = dict(re.findall(r"^\| `([A-Z_]+)` \| (.*?) \|", (DOCS / "install.md").read_text(), re.MULTILINE))
    source = (ROOT / "CMakeLists.txt").read_text()
    options = dict(re.findall(r'^ck_option\((\w+) \w+ (\S+) "', source, re.MULTILINE))
    assert set(stated) == set(options)
    for name, default in options.items():
        if "${" not in default:
            assert stated[name].strip("`") == (default.strip('"') or "none"), name


def test_extras_exist() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    for extra in re.findall(r"pip install '\.\[(\w+)\]'", "".join((ROOT / page).read_text() for page in PAGES)):
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra


def test_the_test_command_builds_nothing_and_is_what_ci_runs() -> None:
    install, test = blocks("bash")[:2]
    assert install.startswith("pip install -v . &&")
    assert test == "pip install -r tests/requirements.txt && python -m pytest -n auto\n", (
        "the package itself is installed already"
    )
    assert f"\n{test}" in (ROOT / ".ci" / "run").read_text()


def test_the_two_lists_of_test_packages_are_the_same() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    (extra,) = re.findall(r"^test = \[\n(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    lines = (ROOT / "tests" / "requirements.txt").read_text().splitlines()
    assert re.findall(r'^  "(.+)",$', extra, re.MULTILINE) == [line for line in lines if not line.startswith("#")]


def anchors(page: Path) -> list[str]:
    """Of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("name", PAGES)
def test_links_and_files_exist(name: str) -> None:
    path = ROOT / name
    text = path.read_text()
    links = re.findall(r"\]\(([^()\s]+)\)", text) + re.findall(r"^\[[^\]]+\]: (\S+)$", text, re.MULTILINE)
    for link in links:
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        assert "://" in link or target.exists(), f"{name} links to {file}"
        if anchor and target.suffix == ".md" and "://" not in link:
            assert anchor in anchors(target), f"{name} links to {link}, where no heading has that name"
    for script in re.findall(r"python (\S+\.py)", text):
        assert (ROOT / script).exists(), f"{name} runs {script}"
