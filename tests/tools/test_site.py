"""The documentation site: it builds without a warning, and works in a browser."""

from __future__ import annotations

import contextlib
import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urldefrag

import pytest
from paths import ROOT

BROWSERS = ("chromium", "google-chrome")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for module in ("material", "mkdocstrings"):
        pytest.importorskip(module, reason="the site needs pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    # No --quiet: warnings that are not shown do not fail a strict build.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def test_examples_are_code(site: Path) -> None:
    for page in (site / "reference").glob("*.html"):
        text = page.read_text()
        assert "<blockquote" not in text, page.name
        prompts = text.count("&gt;&gt;&gt;")
        assert text.count('<span class="gp">&gt;&gt;&gt;') == prompts, f"{page.name}: a prompt in prose"


def test_the_reference_has_every_public_name(site: Path) -> None:
    import cutlass_kernels as ck

    text = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
    modules = {
        "cascade",
        "decode",
        "mla",
        "page",
        "pod",
        "prefill",
        "quantization",
        "rope",
        "sparse",
        "utils",
        "__version__",
    }
    for name in set(ck.__all__) - modules:
        assert f'id="cutlass_kernels.{name}"' in text, f"docs/reference has no page with {name}"
    assert ":func:" not in text


def test_pages_in_a_browser(site: Path, address: str) -> None:
    """Every page shows all its pictures, every link leads somewhere, nothing comes from other hosts, search works."""
    playwright = pytest.importorskip("playwright.sync_api", reason="the browser test needs pip install '.[docs]'")
    browser_path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser_path is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    faults: list[str] = []
    anchors: dict[str, set[str]] = {}
    links: list[tuple[str, str]] = []
    with playwright.sync_playwright() as run:
        browser = run.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        page = browser.new_page()
        page.on("response", lambda r: r.status >= 400 and faults.append(f"{r.url}: {r.status}"))
        page.on("requestfailed", lambda r: faults.append(f"{r.url}: {r.failure}"))
        page.on("request", lambda r: r.url.startswith((address, "data:", "blob:")) or faults.append(f"asks {r.url}"))
        page.on("pageerror", lambda error: faults.append(f"{page.url}: {error}"))
        for file in sorted(site.rglob("*.html")):
            url = address + file.relative_to(site).as_posix()
            if file.name == "404.html":
                continue
            page.goto(url, wait_until="networkidle")
            broken = "pictures => pictures.filter(i => i.complete && !i.naturalWidth).map(i => i.src)"
            faults += [f"{url}: no picture {source}" for source in page.eval_on_selector_all("img", broken)]
            anchors[url] = set(page.eval_on_selector_all("[id]", "all => all.map(e => e.id)"))
            links += [(url, to) for to in page.eval_on_selector_all("a[href]", "all => all.map(e => e.href)")]
        page.goto(address + "index.html")
        results = page.locator(".md-search-result__item a")
        for _ in range(20):  # what is typed before the scripts listen is lost
            page.fill("input.md-search__input", "")
            page.locator("input.md-search__input").press_sequentially("return_lse")
            with contextlib.suppress(playwright.TimeoutError):
                results.first.wait_for(timeout=5_000)
                break
        found = page.inner_text(".md-search-result__list")
        browser.close()
    for url, target in links:
        to, anchor = urldefrag(target)
        if not to.startswith(address):
            assert to.startswith("https://"), f"{url} links to {target}"
            continue
        to = to + "index.html" if to.endswith("/") else to
        if to.endswith(".html") and to not in anchors:
            faults.append(f"{url} links to {target}, which does not exist")
        elif anchor and anchor not in anchors[to]:
            faults.append(f"{url} links to {target}, where nothing has that name")
    assert not faults, "\n".join(sorted(set(faults)))
    assert len(anchors) > 20
    assert "return_lse" in found and "single_prefill_with_kv_cache" in found, found
