"""What the scripts of this folder share: the sections of RESULTS.md, and this machine in words."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import torch

RESULTS = Path(__file__).with_name("RESULTS.md")


def update_section(path: Path, heading: str, text: str) -> None:
    """Write the section under a heading of the second level, in place of the one there or at the end."""
    section = f"{heading}\n\n{text.strip()}\n"
    content = path.read_text()
    pattern = re.compile(re.escape(heading) + r"\n.*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)
    if pattern.search(content):
        content = pattern.sub(lambda _: section + "\n", content).rstrip() + "\n"
    else:
        content = f"{content.rstrip()}\n\n{section}"
    path.write_text(content)


def machine() -> str:
    """This machine in words."""
    return (
        f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}, torch {torch.__version__}"
    )
