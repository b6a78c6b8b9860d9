"""The documentation site: it builds without a warning, and works in a browser."""

from __future__ import annotations

import contextlib
import functools
import html.parser
import http.server
import json
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urldefrag

import draw_pipelines
import pytest
import site_figures
from commands import python
from paths import ROOT

BROWSERS = ("chromium", "google-chrome")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for module in ("material", "mkdocstrings"):
        pytest.importorskip(module, reason="the site needs pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    # No --quiet: warnings that are not shown do not fail a strict build.
    python("-m", "mkdocs", "build", "--strict", "--site-dir", folder, cwd=ROOT, NO_MKDOCS_2_WARNING="1")
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


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="the browser test needs pip install '.[docs]'")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    with playwright.sync_playwright() as run:
        browser = run.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


def pages(site: Path) -> list[str]:
    names = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    names.remove("404.html")  # its links need a server
    return names


class _Loads(html.parser.HTMLParser):
    """What a page loads: scripts, styles and pictures."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "link", "img", "source", "iframe"):
            self.addresses += [to for name, to in attributes if name in ("src", "href", "srcset") and to]


def test_pages_load_their_own_files(site: Path) -> None:
    """Scripts, styles, fonts and pictures come from the folder of the site."""
    for name in pages(site):
        page = site / name
        for address in _Loads(page).addresses:
            assert ":" not in address and not address.startswith("/"), f"{name} loads {address}"
            assert (page.parent / urldefrag(address)[0]).is_file(), f"{name} loads {address}, which does not exist"
    for style in site.rglob("*.css"):
        outside = re.findall(r"@import[^;]*|url\(['\"]?(?:https?:)?//[^)]*\)", style.read_text())
        assert not outside, f"{style.name}: {outside}"


def test_the_search_needs_no_server(site: Path) -> None:
    """A page of file:// may not read JSON or start a Worker: the index is a script, and so is the worker's stand-in."""
    index = (site / "search" / "search_index.js").read_text()
    assert index.startswith("var __index = ")
    entries = json.loads(index.removeprefix("var __index = "))["docs"]
    assert any("return_lse" in entry["text"] for entry in entries)
    for name in pages(site):
        scripts = [address for address in _Loads(site / name).addresses if address.endswith("iframe-worker.js")]
        assert len(scripts) == 1, name


def test_code_has_a_copy_button(site: Path) -> None:
    for name in pages(site):
        config = re.search(r'<script id="__config" type="application/json">(.*?)</script>', (site / name).read_text())
        assert config and "content.code.copy" in json.loads(config[1])["features"], name


def test_code_fits_the_page() -> None:
    for path in sorted((ROOT / "docs").rglob("*.md")):
        for block in re.findall(r"^```(?:python|diff|text)\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.splitlines():
                assert len(line) <= 100, f"{path.name}: {line}"


def test_pictures_are_those_of_the_data() -> None:
    for path, text in {**site_figures.files(), **draw_pipelines.files()}.items():
        assert path.read_text() == text, "run `python tools/site_figures.py` and `python tools/draw_pipelines.py`"


def test_pictures_follow_the_colour_scheme() -> None:
    """No background, and text that has a colour for each of light and dark pages."""
    pictures = sorted((ROOT / "docs" / "images").glob("*.svg"))
    assert len(pictures) >= 6
    for path in pictures:
        text = path.read_text()
        assert "@media (prefers-color-scheme: dark) { text { fill:" in text, path.name
        width = re.search(r'viewBox="0 0 (\d+)', text)
        assert width and f'<rect width="{width[1]}"' not in text, f"{path.name} has a background"


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


def test_pages_in_a_browser(site: Path, address: str, browser: Any) -> None:
    """Every page shows all its pictures, every link leads somewhere, nothing comes from other hosts."""
    faults: list[str] = []
    anchors: dict[str, set[str]] = {}
    links: list[tuple[str, str]] = []
    page = browser.new_page()
    page.on("response", lambda r: r.status >= 400 and faults.append(f"{r.url}: {r.status}"))
    page.on("requestfailed", lambda r: faults.append(f"{r.url}: {r.failure}"))
    page.on("request", lambda r: r.url.startswith((address, "data:", "blob:")) or faults.append(f"asks {r.url}"))
    page.on("pageerror", lambda error: faults.append(f"{page.url}: {error}"))
    for name in pages(site):
        url = address + name
        page.goto(url, wait_until="networkidle")
        broken = "pictures => pictures.filter(i => i.complete && !i.naturalWidth).map(i => i.src)"
        faults += [f"{url}: no picture {source}" for source in page.eval_on_selector_all("img", broken)]
        anchors[url] = set(page.eval_on_selector_all("[id]", "all => all.map(e => e.id)"))
        links += [(url, to) for to in page.eval_on_selector_all("a[href]", "all => all.map(e => e.href)")]
    page.close()
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


@pytest.mark.parametrize("place", ["server", "folder"])
def test_the_search_in_a_browser(site: Path, address: str, browser: Any, place: str) -> None:
    from playwright.sync_api import TimeoutError

    faults: list[str] = []
    root = address if place == "server" else site.as_uri() + "/"
    page = browser.new_page()
    page.on("request", lambda r: r.url.startswith((root, "data:", "blob:")) or faults.append(f"asks {r.url}"))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(root + "reference/attention.html")
    results = page.locator(".md-search-result__item a")
    for _ in range(20):  # what is typed before the scripts listen is lost
        page.fill("input.md-search__input", "")
        page.locator("input.md-search__input").press_sequentially("return_lse")
        with contextlib.suppress(TimeoutError):
            results.first.wait_for(timeout=5_000)
            break
    found = page.inner_text(".md-search-result__list")
    results.first.click()
    page.wait_for_url("**/*.html?h=*")
    page.close()
    assert not faults, faults
    assert "return_lse" in found and "single_prefill_with_kv_cache" in found, found


def test_pages_on_a_phone(site: Path, browser: Any) -> None:
    """No page scrolls sideways, only tables, code and pictures in it. No name in a table breaks inside a word."""
    faults: list[str] = []
    page = browser.new_page(viewport={"width": 390, "height": 844})
    for name in pages(site):
        page.goto((site / name).as_uri())
        if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
            faults.append(f"{name} scrolls sideways")
        broken = "codes => codes.filter(c => c.getClientRects().length > 1).map(c => c.textContent)"
        faults += [f"{name} breaks {code}" for code in page.eval_on_selector_all("table code", broken)]
        small = "pictures => pictures.filter(i => !i.currentSrc.includes('-narrow') && i.width < 700).map(i => i.src)"
        faults += [f"{name} shows {source} too small" for source in page.eval_on_selector_all("article img", small)]
    page.close()
    assert not faults, "\n".join(faults)
