"""Runs a script of task 1a as its command line does, on fewer digits of 8x8 pixels: small_digits.py
SCRIPT ARGUMENTS."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

from mlbench_core.dataset.imagerecognition import pytorch as images


class SmallDigits(images.Digits):
    """Every second digit at 8x8, as it is, which takes a thirtieth of the time."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "size": 8})
        count = len(self.targets) // 4 * 2  # an even number, so that two workers get equally many
        self.images = self.images[::2][:count].contiguous()
        self.targets = self.targets[::2][:count]


if __name__ == "__main__":
    images.Digits = SmallDigits  # type: ignore[misc]
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
