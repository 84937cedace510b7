"""Build the files of a release and check them, without publishing anything: ``make release``.

``python tools/release.py FOLDER`` copies the parts of the checkout that a build reads. It builds
the source distribution and, from this, the wheel, and compares the contents of both with the
checkout. It runs ``twine check``. At the end it prints the steps of a real release, which
CONTRIBUTING.md explains. The exit status is 1 if something is wrong."""

from __future__ import annotations

import argparse
import email
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Folders of the checkout, and the packages that they become in the wheel.
PACKAGES = {
    "mlbench_core": "mlbench_core",
    "mlbench_master": "mlbench_master",
    "mlbench_cli": "mlbench_cli",
    "benchmarks": "mlbench_benchmarks",
    "csrc": "mlbench_csrc",
    "helm": "mlbench_helm",
}
# Measured results, the files of experiments, and values with which tests render the chart.
ONLY_IN_THE_CHECKOUT = re.compile(
    r"mlbench_benchmarks/(micro/(RESULTS\.md|results/.*)|experiments/.*)|mlbench_helm/mlbench/ci/.*"
)
NEVER = re.compile(r"(^|/)(tests|docs|tools)/|\.pyc$|\.so$")
SOURCES = (
    "setup.py", "pyproject.toml", "MANIFEST.in", "Makefile",
    "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff",
)  # fmt: skip
SOURCE_FOLDERS = (*PACKAGES, "requirements")
COMPILED = ("__pycache__", "*.pyc", "*.so")


def copy_sources(target: Path) -> None:
    """Copy the parts of the checkout that a build reads, and some that it must leave out."""
    for name in SOURCES:
        shutil.copy(ROOT / name, target)
    ignore = shutil.ignore_patterns(*COMPILED)
    for name in SOURCE_FOLDERS:
        shutil.copytree(ROOT / name, target / name, ignore=ignore)
    ignore = shutil.ignore_patterns(*COMPILED, "*.egg-info", "_build", "results")
    for name in ("docs", "tools"):
        shutil.copytree(ROOT / name, target / name, ignore=ignore)


def build(folder: Path) -> tuple[Path, Path]:
    """Build a source distribution and, from its contents, a wheel.

    The packages of the build come from this environment, so that nothing is downloaded.

    Args:
        folder: Gets both files.

    Returns:
        The source distribution and the wheel.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    options = ["--no-isolation", "--skip-dependency-check", "--outdir", str(folder)]
    with tempfile.TemporaryDirectory() as name:
        copy_sources(Path(name))
        command = [sys.executable, "-m", "build", *options, name]
        done = subprocess.run(
            command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    if done.returncode:
        raise SystemExit(f"{done.stdout}\nthe build failed")
    (source,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return source, wheel


def names_in_source(source: Path) -> set[str]:
    """Return the files of a source distribution, without the folder that contains all of them."""
    with tarfile.open(source) as archive:
        return {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}


def names_in_wheel(wheel: Path) -> set[str]:
    """Return the files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def expected_in_wheel() -> set[str]:
    """Return the files of the checkout that belong into the wheel, by their names there."""
    expected = set()
    for folder, package in PACKAGES.items():
        for path in (ROOT / folder).rglob("*"):
            name = f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
            is_left_out = NEVER.search(name) or ONLY_IN_THE_CHECKOUT.fullmatch(name)
            if path.is_file() and not is_left_out:
                expected.add(name)
    return expected


def find_problems(source: Path, wheel: Path) -> list[str]:
    """Compare a source distribution and a wheel with the checkout.

    Returns:
        One sentence for each file that is missing or must not be there; an empty list if all is
        right.
    """
    in_source, in_wheel, expected = (
        names_in_source(source),
        names_in_wheel(wheel),
        expected_in_wheel(),
    )
    # The names of the source distribution's files, as they would be in a wheel.
    as_packaged = set()
    for name in in_source:
        folder, slash, rest = name.partition("/")
        if slash and folder in PACKAGES:
            as_packaged.add(f"{PACKAGES[folder]}/{rest}")
    metadata = {name for name in in_wheel if name.split("/")[0].endswith(".dist-info")}
    sources = files_below("requirements") | set(SOURCES)
    refused = filter(NEVER.search, in_source)
    problems = []
    for file, problem, names in (
        (wheel, "lacks", expected - in_wheel),
        (wheel, "must not have", in_wheel - metadata - expected),
        (source, "lacks", sources - in_source),
        (source, "lacks", expected - as_packaged),
        (source, "must not have", refused),
    ):
        problems += [f"{file.name} {problem} {name}" for name in sorted(names)]
    return problems


def files_below(folder: str) -> set[str]:
    """Return the files of a folder of the checkout."""
    files = set()
    for path in (ROOT / folder).rglob("*"):
        name = path.relative_to(ROOT).as_posix()
        if path.is_file() and not NEVER.search(name):
            files.add(name)
    return files


def read_metadata(wheel: Path) -> email.message.Message:
    """Return the metadata of a wheel: version, required packages, extras, description."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def describe(source: Path, wheel: Path) -> str:
    """Return the sizes of both files and the number of files in each top folder."""
    lines = []
    for path, names in ((source, names_in_source(source)), (wheel, names_in_wheel(wheel))):
        lines.append(f"{path.name}: {path.stat().st_size / 2**20:.1f} MiB, {len(names)} files")
        # The top folder of a file with its slash, or the whole name of a file that is in none.
        tops = Counter(re.match(r"[^/]*/?", name)[0] for name in names)
        lines += [f"  {count:>5}  {top}" for top, count in sorted(tops.items())]
    return "\n".join(lines)


def next_steps(version: str) -> str:
    """Return the remaining steps of a real release of a version."""
    final = re.sub(r"\.dev\d+$", "", version)
    steps = [
        f"set the version {final} in the files that CONTRIBUTING.md lists",
        f"in CHANGELOG.md, replace [Unreleased] by [{final}] with the date",
        "run make test, make docs and make release",
        f"commit, and tag the commit v{final}",
        "upload both files with twine, and publish the built pages",
    ]
    return "\n".join(f"  {number}. {step}" for number, step in enumerate(steps, 1))


def run_twine(*files: Path) -> bool:
    """Run ``twine check``, and return False if it found something or twine is not installed."""
    if importlib.util.find_spec("twine") is None:
        print("twine check: not run, because twine is not installed (pip install twine)")
        return False
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, files)]
    return subprocess.run(command).returncode == 0


def main() -> int:
    """Build, check and describe."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "folder", type=Path, nargs="?", default=ROOT / "dist", help="folder for both files"
    )
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("*.whl"), *folder.glob("*.tar.gz")):
        old.unlink()
    source, wheel = build(folder)
    print(describe(source, wheel))
    problems = find_problems(source, wheel)
    print("\n".join(problems) or "contents: as expected")
    twine_agrees = run_twine(source, wheel)
    print("Nothing was published. A real release:")
    print(next_steps(str(read_metadata(wheel)["Version"])))
    return int(bool(problems) or not twine_agrees)


if __name__ == "__main__":
    sys.exit(main())
