"""The file of a sweep."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from mlbench_core.errors import ConfigurationError
from mlbench_core.network.named_networks import get_network
from mlbench_core.sweep import toml_file
from mlbench_core.sweep.sweep_folder import SweepFolder
from mlbench_core.sweep.toml_file import load_sweep, parse_sweep

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "sweep.md"
LEAST: dict[str, Any] = {"task": "1a", "workers": [1], "algorithms": ["power_sgd"]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sedes": 3}, "key 'sedes' must be one that a sweep has: did you mean 'seeds'?"),
        ({"command": "train.py"}, "one of task, command and script must be given"),
        ({"script": "train.py"}, "one of task, command and script must be given"),
        ({"methods": ["bf16"]}, "methods must be given with script only"),
        ({"goal": "loss<=1"}, "goal must be given with script only"),
        ({"algorithms": ["power_sdg"]}, "not 'power_sdg': did you mean 'power_sgd'?"),
        ({"algorithms": "power_sgd"}, "algorithms must be a list of texts, not 'power_sgd'"),
        ({"algorithms": []}, "algorithms must be given"),
        (
            {"variants": [{"name": "x"}]},
            "a table of variants must have name and arguments, not name",
        ),
        ({"variants": [{"name": "power_sgd", "arguments": []}]}, "not 'power_sgd' twice"),
        (
            {"variants": [{"name": "x", "arguments": ["--seed=3"]}]},
            "arguments of 'x' must not have --seed",
        ),
        ({"arguments": ["--light"]}, "arguments must not have --light"),
        (
            {"arguments": ["--goal-after", "60"]},
            "a sweep must not have --goal-after: it compares times",
        ),
        (
            {"variants": [{"name": "x", "arguments": ["--goal-after=60"]}]},
            "a sweep must not have --goal-after",
        ),
        ({"workers": [0]}, "workers must be whole numbers from 1 to 250, not [0]"),
        ({"workers": [2]}, "networks must be given for several workers"),
        ({"workers": [2], "networks": ["lan"]}, "network must be a name, a .toml file or a text"),
        (
            {"workers": [2], "networks": ["2x2:10gbit/100mbit"]},
            "hosts must be 4 (2 racks of 2), not 2",
        ),
        ({"networks": ["lan-1g", "lan-1g"]}, "networks must differ, not 'lan-1g' twice"),
        ({"seeds": 0}, "seeds must be a whole number from 1 to 1000, not 0"),
        ({"light": "yes"}, "light must be true or false, not 'yes'"),
        ({"repeat_stopped": False}, "limit must be given with repeat_stopped = false"),
        ({"repeat_stopped": 0}, "repeat_stopped must be true or false, not 0"),
        ({"limit": "2 minutes"}, "limit must be a time such as"),
        ({"limit": 120}, "limit must be a time such as"),
        ({"limit": "0s"}, "limit must be a time such as"),
        ({"time": "predicted"}, 'time must be "measured" or "modelled", not \'predicted\''),
        ({"time": "modelled", "limit": "1min"}, 'limit must not be given with time = "modelled"'),
        ({"price": "aws"}, "price must be a table"),
        ({"price": {"machine": "m"}}, "machine of price must be one of aws-c5.xlarge, "),
        ({"price": {"spot": "false"}}, "spot of price must be true or false"),
        (
            {"price": {"currency": "EUR"}},
            "price must have the keys machine, spot and prices only, not 'currency'",
        ),
        ({"title": 3}, "title must be a text, not 3"),
        ({"backend": "nccl"}, "nccl needs GPUs"),
    ],
)
def test_a_wrong_file_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, ConfigurationError), match=re.escape(message)):
        parse_sweep({**LEAST, **change})


SCRIPT: dict[str, Any] = {"script": "train.py --lr 1", "workers": [1], "methods": ["as-is"]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": []}, "methods must be given with script"),
        (
            {"methods": "bf16"},
            "methods must be a list of texts, not 'bf16': write for example [\"as",
        ),
        ({"methods": ["bf61"]}, "bf61"),
        ({"methods": ["power_sgd:rank=x"]}, "rank of power_sgd must be"),
        ({"methods": ["power_sgd", "power_sgd:rank=2"]}, "not 'power_sgd' twice"),
        ({"algorithms": ["power_sgd"]}, "algorithms must not be given with script: write methods"),
        ({"variants": []}, "variants must not be given with script: write methods"),
        ({"light": True}, "light must not be given with script: write a goal"),
        ({"metrics": ["loss"]}, "metrics must be a table, not ['loss']"),
        ({"metrics": {"loss": 3}}, "loss must be a text, not 3"),
        ({"metrics": {"loss": "("}}, "metrics: loss must have a regular expression, not '('"),
        (
            {"metrics": {"a b": "(.*)"}},
            "metrics must be {NAME = 'REGEX'}, not 'a b=(.*)': write for example "
            "metrics = {val_loss = 'val loss ([0-9.]+)'}",
        ),
        (
            {"goal": "loss"},
            "goal must be NAME<=VALUE or NAME>=VALUE, not 'loss': write for example "
            "goal = 'val_loss<=1.5'",
        ),
        (
            {"goal": "f1>=0.9"},
            "goal must be on a metric of the script, not 'f1': add metrics = {f1 = 'REGEX'}, or "
            "take train_loss",
        ),
        ({"methods": ["power"]}, "methods must be NAME or NAME:key=value,..., not 'power'"),
        ({"methods": ["bf16:rank=2"]}, "methods: bf16 must not have the option 'rank'"),
        (
            {"methods": ["power_sgd:rank=x"]},
            """rank of power_sgd must be an integer of at least 1, not 'x': write for example """
            """methods = ["power_sgd:rank=2"]""",
        ),
        ({"goal": 3}, "goal must be a text, not 3"),
        ({"goal": "-loss<=1"}, "goal must be NAME<=VALUE or NAME>=VALUE, not '-loss<=1'"),
        ({"metrics": {"-m": "(.*)"}}, "metrics must be {NAME = 'REGEX'}, not '-m=(.*)'"),
    ],
)
def test_a_wrong_file_of_a_script_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, ConfigurationError), match=re.escape(message)) as found:
        parse_sweep({**SCRIPT, **change})
    assert "--" not in str(found.value), "options, which a file does not have"


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("muon", "--optimizer muon"),
        ("muloco", "--method diloco --optimizer muon"),
        ("ef21_muon", "--method ef21:momentum=0.9 --optimizer muon:momentum=0"),
    ],
)
def test_a_method_that_replaces_the_optimizer_is_not_for_a_sweep(method: str, words: str) -> None:
    end = f": a sweep keeps the script's optimizer, so use mlbench run with {words}"
    with pytest.raises(ConfigurationError, match=rf"^methods must .*{re.escape(end)}$"):
        parse_sweep({**SCRIPT, "methods": [method]})


def test_a_fixed_training_time_is_refused_unless_a_script_has_an_option_of_that_name() -> None:
    words = "train.py --seed {seed} --goal-after 60"
    variants = [{"name": "x", "arguments": []}]
    with pytest.raises(ValueError, match="must not have --goal-after"):
        parse_sweep({"command": words, "workers": [1], "variants": variants})
    assert parse_sweep({**SCRIPT, "script": words}).script[-1] == "60"
    # The trials of a tuning are compared by their values.
    tuning = {"parameter": "--lr", "default": 0.1, "horizon": ["--goal-after", "60"]}
    assert parse_sweep({**LEAST, "tuning": tuning}).tuning is not None


def test_the_methods_of_a_script_are_its_algorithms(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        "script = 'train.py --lr 1'\narguments = ['--seed', '{seed}']\nworkers = [2]\nseeds = 2\n"
        "networks = ['lan-1g']\nmethods = ['as-is', 'power_sgd:rank=4']\n"
        "metrics = {val_loss = 'val loss ([0-9.]+)'}\ngoal = 'val_loss<=1.5'\n"
    )
    sweep = load_sweep(path)
    points = sweep.points()
    assert [point.name for point in points] == [
        f"{name}-2-lan-1g-s{seed}" for seed in (42, 43) for name in ("as-is", "power-sgd-rank-4")
    ]
    assert points[3].algorithm == "power_sgd:rank=4"
    assert points[3].request["command"] == (
        "python -m mlbench_core.observe --method power_sgd:rank=4 "
        "--metric 'val_loss=val loss ([0-9.]+)' --goal 'val_loss<=1.5' train.py --lr 1 --seed 43"
    )
    # A script that takes no seed can be repeated, too.
    again = parse_sweep({**SCRIPT, "seeds": 2}).points()
    assert len({point.request["command"] for point in again}) == 1 and len(again) == 2


def test_names_that_would_collide_are_refused() -> None:
    tables = [{"name": "power sgd", "arguments": []}]
    with pytest.raises(
        ConfigurationError, match="not 'power sgd' and 'power_sgd': both runs would be"
    ):
        parse_sweep({**LEAST, "variants": tables}).points()
    twice = {**LEAST, "workers": [2], "networks": ["100mbit,1ms", "100mbit, 1ms"]}
    with pytest.raises(ConfigurationError, match="not '100mbit, 1ms' and '100mbit,1ms'"):
        parse_sweep(twice).points()


def test_a_long_name_stays_a_name_of_a_run() -> None:
    tables = [{"name": f"{'a' * 80}{end}", "arguments": []} for end in "bc"]
    names = {point.name for point in parse_sweep({**LEAST, "variants": tables}).points()}
    assert len(names) == 3 and max(map(len, names)) == 63


def test_the_order_is_seed_by_seed_and_one_worker_has_no_network() -> None:
    sweep = parse_sweep(
        {**LEAST, "workers": [1, 2], "networks": ["lan-1g", "100mbit,20ms"], "seeds": 2}
    )
    assert [point.name for point in sweep.points()] == [
        *("power-sgd-1-s42", "power-sgd-2-lan-1g-s42", "power-sgd-2-100mbit-20ms-s42"),
        *("power-sgd-1-s43", "power-sgd-2-lan-1g-s43", "power-sgd-2-100mbit-20ms-s43"),
    ]


def test_a_whole_file(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "slow.toml").write_text('[link]\nbandwidth = "1mbit"\n')
    path = tmp_path / "my.toml"
    path.write_text(
        'command = "python train.py --seed {seed}"\nworkers = [2]\nnetworks = ["slow.toml"]\n'
        'limit = "1.5min"\n'
        'budget = "3h"\n[[variants]]\nname = "a b"\narguments = ["--x", "a b"]\n[price]\n'
        'machine = "aws-c5.xlarge"\n'
    )
    sweep = load_sweep(path)
    assert (sweep.title, sweep.limit_s, sweep.budget_s) == ("my", 90, 10800)
    assert sweep.price.machine is not None and sweep.price.machine.name == "aws-c5.xlarge"
    (point,) = sweep.points()
    assert point.name == "a-b-2-slow-s42"
    assert point.request["command"] == f"python {tmp_path}/train.py --seed 42 --x 'a b'"
    assert point.request["network"] == "1mbit"
    path.write_text("title = ")
    with pytest.raises(ConfigurationError, match=r"the sweep .*my.toml cannot be used: "):
        load_sweep(path)
    with pytest.raises(ConfigurationError, match="cannot read the sweep"):
        load_sweep(tmp_path / "none.toml")


def test_the_folder_of_a_sweep_has_the_files_that_it_names(tmp_path: Path) -> None:
    named = tmp_path / "named"
    for folder, bandwidth in (("one", "1mbit"), ("two", "2mbit")):
        (named / folder).mkdir(parents=True)
        (named / folder / f"net-{folder}.toml").write_text(f'[link]\nbandwidth = "{bandwidth}"\n')
    (named / "net-one.toml").write_text(
        '[[machine]]\nname = "mine"\nprovider = "p"\ncpu = "c"\ncores = 1\nmemory_gib = 1\n'
    )
    (named / "lab.toml").write_text(
        f'title = "Lab"\ntask = "1a"\nworkers = [2]\nalgorithms = ["power_sgd"]\n'
        f'networks = ["lan-1g", "one/../one/net-one.toml", "{named}/two/net-two.toml"]\n'
        '[price]\nmachine = "mine"\nprices = "net-one.toml"\n'
    )
    sweep, copy = load_sweep(named / "lab.toml"), tmp_path / "out" / "sweep.toml"
    with SweepFolder(tmp_path / "out").open(named / "lab.toml", sweep.files):
        pass
    shutil.rmtree(named)
    found = load_sweep(copy)
    assert found == sweep and list(found.networks.values()) == [
        get_network(n) for n in ("lan-1g", "1mbit", "2mbit")
    ]
    with SweepFolder(tmp_path / "out").open(copy, found.files):
        assert load_sweep(copy) == sweep


def test_the_file_on_the_page_is_a_sweep(tmp_path: Path) -> None:
    page = PAGE.read_text()
    path = tmp_path / "lab.toml"
    path.write_text(page.partition("```toml\n")[2].partition("```")[0])
    sweep = load_sweep(path)
    # Of one worker, three algorithms and three seeds; of two and four, three networks each.
    assert len(sweep.points()) == 3 * 3 * (1 + 2 * 3)
    path.write_text(page.split("```toml\n")[2].partition("```")[0])
    tuned = load_sweep(path)
    trials = len(SweepFolder(tmp_path / "out").planned(tuned)) - len(tuned.points())
    assert (
        trials == 30 and "5 trials of each algorithm with each number of workers, 30 in all" in page
    )
    path.write_text(page.split("```toml\n")[3].partition("```")[0])
    modelled = load_sweep(path)
    # Of three algorithms, five numbers of workers and three seeds.
    assert modelled.is_modelled and len(modelled.points()) == 3 * 5 * 3
    for key in toml_file._KEYS:
        assert f"`{key}`" in page
