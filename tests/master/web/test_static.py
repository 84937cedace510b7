"""The scripts and styles of the pages: those of others are unchanged, and nothing comes from
another host."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

import mlbench_master

ROOT = Path(mlbench_master.__file__).parent / "web"
VENDOR = ROOT / "static" / "vendor"
CHECKSUMS = dict(
    line.split("  ")[::-1] for line in (VENDOR / "SHA256SUMS").read_text().splitlines()
)
OWN = sorted(path for path in (ROOT / "static").iterdir() if path.suffix in (".js", ".css", ".svg"))


def test_every_script_of_others_has_its_checksum_and_its_licence() -> None:
    files = {path.name for path in VENDOR.iterdir() if path.suffix in (".js", ".css")}
    assert files == set(CHECKSUMS) != set()
    for name in files:
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == CHECKSUMS[name]
        assert (VENDOR / f"{name.split('.')[0]}.LICENSE").read_text().strip()
        assert f"`{name}`" in (VENDOR / "README.md").read_text()


@pytest.mark.parametrize(
    "path", [*OWN, *sorted((ROOT / "templates").iterdir())], ids=lambda path: path.name
)
def test_a_page_needs_no_other_host_and_no_inline_code(path: Path) -> None:
    """The Content-Security-Policy would refuse them, and only a browser would tell."""
    text = path.read_text()
    assert not re.findall(
        r"(?:src|href|url|import|from)\s*[=(]?\s*[\"'(]*(?:https?:)?//(?!www\.w3\.org)", text
    )
    if path.suffix == ".html":
        assert not re.findall(
            r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son[a-z]+=|javascript:", text
        )
        assert "| safe" not in text
    else:
        assert "innerHTML" not in text and "eval(" not in text
