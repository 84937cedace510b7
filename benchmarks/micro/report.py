"""Write RESULTS.md from the JSON files in ``results``.

python benchmarks/micro/report.py
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from _bench import RESULTS, markdown, read

from mlbench_core.files import replacing

PAGE = RESULTS.with_name("RESULTS.md")
HEAD = """\
# Timings of single parts

This page is generated: `python benchmarks/micro/report.py` writes it from the files \
in `benchmarks/micro/results`, and
each script of this folder writes its file with `--save`.

Variants run interleaved. A value is the median over the blocks, with their range in brackets. \
"times X" is the value
divided by that of X: the median, and the range, of the ratios within a block. \
Machines are small and shared, so compare
only values within one case.
"""


def page(folder: Path) -> str:
    """Make the whole page from the results in a folder."""
    parts = [HEAD]
    for result in map(read, sorted(folder.glob("*.json"))):
        # Two spaces at the end of a line are a line break in Markdown.
        reading = "  \n".join(result["reading"])
        parts.append(
            f"## {result['title']}\n\n{reading}\n\n"
            f"Reproduce: `{result['reproduce']}`\n\n{markdown(result)}"
        )
    return "\n".join(parts)


def main(argv: Sequence[str] | None = None) -> None:
    """Write the page."""
    argparse.ArgumentParser(description=__doc__).parse_args(argv)
    with replacing(PAGE) as temporary:
        temporary.write_text(page(RESULTS), encoding="utf-8")


if __name__ == "__main__":
    main()
