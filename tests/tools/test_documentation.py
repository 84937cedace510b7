"""The documentation as it is built: no warning, and no link within it that leads nowhere."""

from __future__ import annotations

import subprocess
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from api_reference import own_names, public_modules

# The first test builds the pages, which takes minutes on a busy machine.
pytestmark = pytest.mark.timeout(900)
DOCS = Path(__file__).parents[2] / "docs"


class Page(HTMLParser):
    """The places of a page, and the addresses that it uses.

    Attributes:
        ids: The places.
        addresses: Of links, pictures, scripts and styles.
        loaded: Those that a browser fetches by itself.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.addresses: set[str] = set()
        self.loaded: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if values.get("id"):
            self.ids.add(str(values["id"]))
        address = values.get("href") or values.get("src")
        if address:
            self.addresses.add(address)
            if tag != "a":
                self.loaded.add(address)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the pages; a warning is an error."""
    folder = tmp_path_factory.mktemp("html")
    options = ["-W", "--keep-going", "-q", "-t", "quick", "-b", "html"]
    options += ["-D", "toc_object_entries=0"]  # which takes a quarter of the time
    options += ["-D", "smartquotes=0"]
    # The search for garbage takes another quarter, and to free the memory at the end some seconds.
    code = "import gc, os, sys; gc.disable(); from sphinx.cmd.build import main; status = main(); "
    code += "sys.stdout.flush(); sys.stderr.flush(); os._exit(status)"
    command = [sys.executable, "-c", code, *options, str(DOCS), str(folder)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return folder


@pytest.fixture(scope="module")
def pages(built: Path) -> dict[Path, Page]:
    """All pages by their files."""
    found = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(built.rglob("*.html"))}
    assert len(found) > 80
    return found


def test_every_link_leads_to_a_place(built: Path, pages: dict[Path, Page]) -> None:
    dead = []
    for page, content in pages.items():
        for address in content.addresses:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            is_page = target.suffix == ".html"
            if not target.exists() or (
                is_page and parts.fragment and unquote(parts.fragment) not in pages[target].ids
            ):
                dead.append(f"{page.relative_to(built)}: {address}")
    assert dead == []


def test_no_page_needs_another_server(pages: dict[Path, Page]) -> None:
    loaded = {address for page in pages.values() for address in page.loaded}
    assert any(address.endswith(".css") or ".css?" in address for address in loaded)
    assert [address for address in loaded if urlsplit(address).netloc] == []


def test_every_public_name_has_an_entry_in_the_api_reference(built: Path) -> None:
    header, packed = (built / "objects.inv").read_bytes().split(b"zlib.\n", 1)
    assert b"version 2" in header
    listed = {
        line.split()[0] for line in zlib.decompress(packed).decode().splitlines() if " py:" in line
    }
    modules = public_modules()
    names = set(modules) | {
        f"{module}.{name}" for module, tree in modules.items() for name in own_names(tree)
    }
    assert len(names) > 1000
    assert sorted(names - listed) == []


def test_no_page_names_the_folder_in_which_it_was_built(built: Path) -> None:
    page = (built / "tutorials" / "porting.html").read_text(encoding="utf-8")
    assert "--- step0.py" in page and "+++ step1.py" in page, "the heads of the diffs"
    named = [
        page.name
        for page in built.rglob("*.html")
        if str(DOCS.parent) in page.read_text(encoding="utf-8")
    ]
    assert named == []
