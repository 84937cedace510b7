"""The command line of an observed script, and the metrics in its output."""

from __future__ import annotations

import io
import math
import subprocess
import sys

import pytest

from mlbench_core.errors import ConfigurationError
from mlbench_core.observe.options import parse_options
from mlbench_core.observe.output import OutputReader, parse_goal, parse_metric


def test_words_after_the_script_are_its_own() -> None:
    options = parse_options(
        ["--run-id=7", "--method", "power_sgd:rank=4", "--metric", "loss=loss=([0-9.]+)",
         "--goal", "loss <= 2", "./train.py", "--method", "mine", "-m", "--", "--goal=3"]
    )  # fmt: skip
    assert options.script == "./train.py"
    assert options.arguments == ("--method", "mine", "-m", "--", "--goal=3")
    assert (options.run_id, str(options.method), options.is_module) == (
        "7", "power_sgd:rank=4", False,
    )  # fmt: skip
    assert options.goal is not None
    assert options.goal.text == "val_loss <= 2"


def test_module() -> None:
    options = parse_options(["-m", "package.train", "--lr", "1"])
    assert (options.script, options.is_module) == ("package.train", True)
    assert options.arguments == ("--lr", "1")


def test_goal_on_the_observed_loss() -> None:
    goal = parse_options(["--goal", "train_loss<=0.5", "train.py"]).goal
    assert goal == parse_goal("train_loss<=0.5")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "a script is missing"),
        (["--method"], "expected one argument"),
        (["--speed", "3", "train.py"], "unrecognized arguments: --speed 3"),
        (["--method", "pwr_sgd", "train.py"], "power_sgd"),
        (["--metric", "loss", "train.py"], "--metric must be NAME=REGEX, not 'loss'"),
        (["--metric", "loss=([", "train.py"], "must have a regular expression"),
        (["--metric", "loss=loss", "train.py"], "must have a group around the number"),
        (["--metric", "train_loss=(.*)", "train.py"], "--metric must not be named 'train_loss'"),
        (["--goal", "loss=3", "train.py"], "--goal must be NAME<=VALUE or NAME>=VALUE"),
        (["--goal", "loss<=nan", "train.py"], "--goal must be NAME<=VALUE or NAME>=VALUE"),
        (
            ["--goal", "acc>=3", "train.py"],
            "--goal must be on a metric of the script, not 'acc': add --metric 'acc=REGEX', or "
            "take train_loss",
        ),
        # The user wrote neither name with the prefix.
        (
            ["--metric", "test_acc=acc (.*)", "--goal", "test_ac>=3", "train.py"],
            "--goal must be on a metric of the script, not 'test_ac': did you mean 'test_acc'?",
        ),
    ],
)
def test_errors(words: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        parse_options(words)
    assert message in str(error.value)


def test_reading_is_by_lines() -> None:
    values: list[tuple[str, float]] = []
    stream = io.StringIO()
    metrics = [parse_metric(r"acc=acc (\S+)"), parse_metric(r"train_x=x=(-?\d+)")]
    OutputReader(metrics, lambda *value: values.append(value)).watch(stream)
    print("acc 1", end="", file=stream)
    print("5.5 x=-3\nacc two\rx=4", file=stream)
    stream.write("acc nan\nacc 9")
    assert values[:3] == [("val_acc", 15.5), ("train_x", -3.0), ("train_x", 4.0)]
    assert math.isnan(values[3][1])
    # The last line has not ended yet.
    assert len(values) == 4
    assert stream.getvalue() == "acc 15.5 x=-3\nacc two\rx=4\nacc nan\nacc 9"


def test_options_import_no_torch() -> None:
    code = "import sys, mlbench_core.observe.options; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
