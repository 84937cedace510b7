"""The source distribution and the wheel contain what they must, and ``make release`` says what is
missing."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import check_extras
import pytest
import release

import mlbench_core

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Both files, built once for all tests here."""
    return release.build(tmp_path_factory.mktemp("dist"))


def test_both_files_have_everything_and_nothing_else(built: tuple[Path, Path]) -> None:
    source, wheel = built
    assert release.find_problems(source, wheel) == []
    assert source.name == f"mlbench_core-{mlbench_core.__version__}.tar.gz"
    assert wheel.name == f"mlbench_core-{mlbench_core.__version__}-py3-none-any.whl"
    chart = {name for name in release.names_in_wheel(wheel) if name.startswith("mlbench_helm/")}
    assert len(chart) > 10
    assert not any("/ci/" in name for name in chart)


def test_the_metadata_are_those_of_the_project(built: tuple[Path, Path]) -> None:
    metadata = release.read_metadata(built[1])
    section = (
        (ROOT / "pyproject.toml")
        .read_text()
        .partition("[project.optional-dependencies]")[2]
        .partition("\n[")[0]
    )
    extras = set(re.findall(r"^(\w+) = \[", section, re.MULTILINE))
    assert set(metadata.get_all("Provides-Extra")) == extras
    assert {*check_extras.CHECKS, *check_extras.IF_NAMED} == {"base", *extras}
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_payload().strip() == (ROOT / "README.md").read_text().strip()
    with zipfile.ZipFile(built[1]) as archive:
        (scripts,) = (
            name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt")
        )
        assert archive.read(scripts).decode().split() == [
            "[console_scripts]",
            "mlbench",
            "=",
            "mlbench_cli:main",
        ]


def test_a_missing_and_a_foreign_file_are_reported(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    source, wheel = built
    changed = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            if name != "mlbench_core/py.typed":
                new.writestr(name, old.read(name))
        new.writestr("tests/test_x.py", "")
    assert release.find_problems(source, changed) == [
        f"{wheel.name} lacks mlbench_core/py.typed",
        f"{wheel.name} must not have tests/test_x.py",
    ]


def test_the_citation_names_this_version_and_license() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^(?:version|license|cff-version): (.*)$", citation, re.MULTILINE) == [
        "1.2.0",
        mlbench_core.__version__,
        "Apache-2.0",
    ]


def test_the_steps_of_a_release_name_the_final_version() -> None:
    steps = release.next_steps("4.1.0.dev3")
    assert "tag the commit v4.1.0" in steps
    assert "dev" not in steps
