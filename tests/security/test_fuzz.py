"""A few random requests; `python -m tests.security.fuzz --cases 20000` sends many."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the [master] extra")
pytest.importorskip("httpx", reason="needs httpx")

from tests.security.fuzz import fuzz, schemathesis


def test_random_requests_are_no_errors_of_the_master_and_every_row_is_read(tmp_path: Path) -> None:
    statuses = fuzz(tmp_path, cases=600, seed=1)
    # Both parts are tested: what is stored and what is refused.
    assert statuses[201] > 100 and statuses[400] > 100


def test_requests_derived_from_the_description_are_answered_as_described(tmp_path: Path) -> None:
    program = os.environ.get("SCHEMATHESIS") or shutil.which("schemathesis")
    if program is None:
        pytest.skip(
            "needs schemathesis: pip install schemathesis, or name the program in SCHEMATHESIS"
        )
    schemathesis(program, tmp_path, cases=200, seed=1, phases="fuzzing")
