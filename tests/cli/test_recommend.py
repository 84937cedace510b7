"""``mlbench recommend``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Call
from tests.results.helpers import write_run

SLOW = "10mbit,40ms"
ON = ("--network", SLOW, "--workers", "2", "--workers", "4")


def write(folder: Path, network: str | None = SLOW) -> Path:
    """Two methods with 1 worker and 2, two seeds each; the goal takes 30 steps."""
    entry = {"op": "all_reduce", "group": 2, "calls": 30, "bytes": 30_000, "overlapped": False}
    for epoch_s, name in ((10.0, "centralized_sgd"), (20.0, "power_sgd")):
        for seed in (1, 2):
            shared = {"algorithm": name, "seed": seed, "epoch_s": epoch_s + seed}
            write_run(folder / f"{name}-1-{seed}", workers=1, collectives=[], **shared)
            write_run(folder / f"{name}-2-{seed}", collectives=[entry], network=network, **shared)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("runs"))


def test_result_folders_are_advised_from(folder: Path, call: Call) -> None:
    header, *lines = call("recommend", str(folder), *ON).stdout.splitlines()
    assert header.split()[:4] == ["NETWORK", "METHOD", "WORKERS", "SECONDS"]
    assert [line.split()[:4] for line in lines[:4]] == [
        [SLOW, "centralized_sgd", "2", "measured"],
        [SLOW, "power_sgd", "2", "measured"],
        [SLOW, "centralized_sgd", "4", "predicted"],
        [SLOW, "power_sgd", "4", "predicted"],
    ]
    # Three epochs of 11 or 12 s; rank 1 reached the goal 0.1 s later.
    assert " 34.6 (" in lines[0]
    assert [line.count("not known") for line in lines[:4]] == [0, 0, 1, 1]
    blank, first, advice, *_ = lines[4:]
    assert blank == "" and first.startswith("The methods are not tuned")
    assert advice.startswith(f"On {SLOW}, more workers are not worth it: one machine has the least")
    assert not any("fastest" in line for line in lines)


def test_json_has_the_rows_and_the_sentences(folder: Path, call: Call) -> None:
    arguments = ("--network", "home-fibre", "--workers", "2", "--machine", "aws-c5.xlarge")
    found = json.loads(call("recommend", str(folder), *arguments, "--json").stdout)
    assert found["tuned"] is False and found["sentences"][0].startswith("The methods are not")
    first = found["rows"][0]
    assert (first["network"], first["seconds"], first["runs"]) == ("home-fibre", "modelled", 2)
    # 0.17 USD an hour for each of two workers.
    assert first["price"] == pytest.approx(first["time_to_goal_s"] / 3600 * 2 * 0.17, rel=0.02)
    table = call("recommend", str(folder), *arguments).stdout
    assert "PRICE (USD)" in table.splitlines()[0] and "Cheapest on home-fibre: " in table


def test_a_sweep_has_its_own_limit_and_networks(folder: Path, call: Call, tmp_path: Path) -> None:
    (tmp_path / "sweep.toml").write_text(
        f'task = "1a"\nworkers = [1, 2]\nnetworks = ["{SLOW}"]\nlimit = "40s"\n'
        'algorithms = ["centralized_sgd", "power_sgd"]\nseeds = 2\n'
    )
    for path in folder.iterdir():
        name, workers, seed = path.name.rsplit("-", 2)
        name = f"{name.replace('_', '-')}-{workers}"
        if workers == "2":
            name += "-10mbit-40ms"
        (tmp_path / "runs" / f"{name}-s{41 + int(seed)}").parent.mkdir(exist_ok=True)
        (tmp_path / "runs" / f"{name}-s{41 + int(seed)}").symlink_to(path)
    lines = call("recommend", str(tmp_path), *ON).stdout.splitlines()
    # power_sgd needs 63 s and more.
    assert [line.split()[1:4] for line in lines[1:3]] == [
        ["centralized_sgd", "2", "measured"],
        ["power_sgd", "2", "measured"],
    ]
    assert "not reached in 2 of 2" in lines[2]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--network", SLOW, "--workers", "0"), 2, "0 is not in the range 1<=x<=1024"),
        (("--network", "mobil-lte", "--workers", "2"), 2, "mobile-lte"),
        (("--network", SLOW, "--workers", "2", "4"), 2, "unexpected extra argument (4)"),
        (("--network", SLOW), 2, "Missing option '--workers'"),
    ],
)
def test_wrong_options_are_refused(
    folder: Path, call: Call, arguments: tuple[str, ...], code: int, message: str
) -> None:
    assert message in call("recommend", str(folder), *arguments, code=code).stderr


def test_folders_without_an_answer_say_why(call: Call, tmp_path: Path) -> None:
    def error(path: Path, code: int = 1) -> str:
        return " ".join(call("recommend", str(path), *ON, code=code).stderr.split())

    assert "has no result" in error(tmp_path)
    (tmp_path / "own.py").touch()
    text = error(tmp_path / "own.py", 2)
    assert "not the script" in text and 'script = "own.py"' in text and "'mlbench predict'" in text
    (tmp_path / "a.zip").touch()
    assert "FOLDER must be a folder, not the file" in error(tmp_path / "a.zip", 2)
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    (sweep / "sweep.toml").write_text(
        f'task = "1a"\nworkers = [1, 2]\nnetworks = ["{SLOW}"]\nalgorithms = ["power_sgd"]\n'
    )
    assert "FOLDER must have runs that have ended" in error(sweep)
    write_run(tmp_path / "aimless" / "run", goal=None)
    assert "FOLDER must have runs with a goal to reach" in error(tmp_path / "aimless")
    for rank in (1, 2):
        write_run(tmp_path / "mixed" / str(rank), options={"rank": rank})
    text = error(tmp_path / "mixed")
    assert "one configuration of centralized_sgd, not several that differ in options.rank" in text
