"""The call for notebooks: the settings, the errors and the progress of a sweep, and its results."""

from __future__ import annotations

import csv
import shutil
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from mlbench_core import experiments
from mlbench_core.aggregation.pytorch import Aggregation
from mlbench_core.calling_environment import FORK_VARIABLE, module_command
from mlbench_core.errors import ConfigurationError, MLBenchError
from mlbench_core.sweep import page
from mlbench_core.sweep.toml_file import load_sweep, parse_sweep
from tests.helpers.processes import ROOT
from tests.results.helpers import write_run

GIVEN: dict[str, Any] = {"script": "train.py", "workers": [2], "networks": ["lan-1g"]}
SCRIPT = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    torch.manual_seed(10 * step + dist.get_rank())
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("val loss", sum(float(p.double().square().sum()) for p in model.parameters()))
dist.destroy_process_group()
"""


class Mean(Aggregation):
    """The average of gradients, as DDP makes it."""

    def aggregate(self, tensors: dict[str, Tensor], op: str, denom: object = None) -> None:
        for tensor in tensors.values():
            dist.all_reduce(tensor, group=self.group)
            tensor /= self.world_size


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script, which is the current one."""
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


Say = Callable[[str], list[list[str]]]


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Say:
    """Put a program in the place of ``mlbench sweep``; return the words of its calls."""

    def put(code: str) -> list[list[str]]:
        calls: list[list[str]] = []

        def command(*words: str) -> list[str]:
            calls.append([*words, Path(words[2]).read_text()])
            # The command leaves a copy of the file.
            output = Path(words[4])
            output.mkdir(parents=True, exist_ok=True)
            (output / "sweep.toml").write_bytes(Path(words[2]).read_bytes())
            return [sys.executable, "-c", f"import sys, signal, time\n{code}"]

        monkeypatch.setattr(experiments, "module_command", command)
        return calls

    return put


def rows_of_csv(path: Path) -> list[dict[str, Any]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def as_texts(rows: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    return [
        {key: "" if value is None else str(value) for key, value in row.items()} for row in rows
    ]


@pytest.mark.timeout(1200)
def test_a_class_of_ten_lines_trains_like_the_average_of_ddp(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Workers of modelled times need no emulated network, so they can be forks.
    monkeypatch.setenv(FORK_VARIABLE, "1")
    try:
        result = experiments.compare(
            ["as-is", Mean],
            **GIVEN,
            metrics={"val_loss": "val loss ([0-9.e-]+)"},
            goal="val_loss<=1000",
            time="modelled",
            output="both",
        )
    finally:
        subprocess.run(module_command("mlbench_cli", "master", "--stop"), check=True)
    rows = {row["algorithm"]: row for row in result.rows}
    assert rows.keys() == {"as-is", "Mean"}
    assert [(row["runs"], row["failed"]) for row in result.rows] == [(1, 0)] * 2
    # Half of a sum and the sum of halves have the same bits.
    assert rows["Mean"]["best"] == rows["as-is"]["best"] is not None
    assert rows["Mean"]["exchanges"] == 5
    assert as_texts(result.rows) == rows_of_csv(folder / "both" / "table.csv")
    assert "time_to_goal" in result.kinds
    assert result.figure("time_to_goal")._repr_svg_().startswith("<svg")


def test_a_call_has_the_settings_of_the_equal_file(folder: Path, say: Say) -> None:
    calls = say("")
    experiments.compare(
        ("as-is", "power_sgd:rank=4"),
        script="train.py --epochs 3",
        workers=range(1, 3),
        networks=["lan-1g", "100mbit,10ms"],
        seeds=3,
        output=Path("out"),
        metrics={"val_loss": 'val "loss" ([0-9.]+)\\s'},
        goal="val_loss<=1.5",
        limit="2min",
        price={"machine": "aws-c5.xlarge", "spot": True},
        title="Größe",
    )
    (words,) = calls
    assert words[:2] == ["mlbench_cli", "sweep"]
    assert words[3:7] == ["--output", str(folder / "out"), "--cwd", str(folder)]
    equal = """
    title = "Größe"
    script = "train.py --epochs 3"
    methods = ["as-is", "power_sgd:rank=4"]
    metrics = {val_loss = 'val "loss" ([0-9.]+)\\s'}
    goal = "val_loss<=1.5"
    workers = [1, 2]
    networks = ["lan-1g", "100mbit,10ms"]
    seeds = 3
    limit = "2min"
    price = {machine = "aws-c5.xlarge", spot = true}
    """
    (folder / "equal.toml").write_text(equal)
    copied, written = load_sweep(folder / "out" / "sweep.toml"), load_sweep(folder / "equal.toml")
    assert copied == written
    assert [one.request for one in copied.points()] == [one.request for one in written.points()]


def test_methods_of_a_task_are_its_algorithms(folder: Path, say: Say) -> None:
    calls = say("")
    experiments.compare(["power_sgd"], task="1a", workers=1, arguments=["--dataset", "digits"])
    sweep = load_sweep(Path(calls[0][4]) / "sweep.toml")
    assert sweep == parse_sweep(
        {
            "task": "1a",
            "workers": 1,
            "algorithms": ["power_sgd"],
            "arguments": ["--dataset", "digits"],
        },
        title=sweep.title,
    )
    assert Path(calls[0][4]).parent.name == "comparisons", "the folder of the user's data"
    assert sweep.title == Path(calls[0][4]).name


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"methods": "as-is"}, "methods must be a list, not 'as-is'"),
        (
            {"methods": []},
            r'methods must be given with script: write for example methods=\["as-is", "bf16"\]$',
        ),
        ({"methods": [3]}, "methods must be names, or classes of mlbench_core.aggregation.pytorch"),
        ({"methods": ["power"]}, "methods must be NAME or NAME:key=value,..., not 'power': did"),
        ({"methods": ["bf16:rank=2"]}, "methods: bf16 must not have the option 'rank'"),
        (
            {"methods": ["muon"]},
            "methods must be .*: a sweep keeps the script's optimizer, so use mlbench run with "
            "--optimizer muon$",
        ),
        (
            {"methods": ["power_sgd:reuse_query=yes"]},
            r'reuse_query .* true or false, .*methods=\["power_sgd:reuse_query=true"\]$',
        ),
        ({"workers": [0]}, r"workers must be whole numbers from 1 to 250, not \[0\]: write"),
        ({"networks": "lan-1g"}, "networks must be a list of texts, not 'lan-1g'"),
        (
            {"networks": ()},
            r'networks must be given for several workers: write for example networks=\["lan-1g"\]$',
        ),
        ({"seeds": 0}, "seeds must be a whole number from 1 to 1000, not 0"),
        ({"script": "no.py"}, "script must begin with a file, not 'no.py', which does not exist"),
        (
            {"script": None},
            'one of task, command and script must be given: write for example task="1a"$',
        ),
        ({"script": None, "task": "1a"}, "methods must be values of --optimizer of task 1a"),
        (
            {"script": None, "task": "1a", "methods": [Mean]},
            "methods must be names if there is no script, not .*Mean.*: give script to",
        ),
        (
            {"goal": "loss"},
            "goal must be NAME<=VALUE or NAME>=VALUE, not 'loss': write for example "
            "goal='val_loss<=1.5'$",
        ),
        (
            {"goal": "test_ac>=0.9", "metrics": {"test_acc": "acc (.*)"}},
            "goal must be on a metric of the script, not 'test_ac': did you mean 'test_acc'",
        ),
        (
            {"goal": "f1>=0.9", "metrics": {"test_acc": "acc (.*)"}},
            r"goal must be on a metric of the script, not 'f1': add metrics=\{'f1': 'REGEX'\}, or "
            "take train_loss or test_acc$",
        ),
        (
            {"metrics": {"a b": "acc (.*)"}},
            r"metrics must be \{'NAME': 'REGEX'\}, not 'a b=acc \(.*\)': write for example "
            r"metrics=\{'val_loss': 'val loss \(\[0-9.\]\+\)'\}$",
        ),
        (
            {"metrics": "acc"},
            "metrics must be a dictionary, not 'acc': write for example "
            r"metrics=\{'val_loss': 'val loss \(\[0-9.\]\+\)'\}$",
        ),
        (
            {"price": "x"},
            r"price must be a dictionary, not 'x': write price=\{\"machine\": \"aws.*\}$",
        ),
        (
            {"tuning": "x"},
            r"tuning must be a dictionary, not 'x': write tuning=\{\"parameter\": .*\}$",
        ),
        ({"tuning": {"parameter": "--lr", "default": 0.1}}, ".*goal='val_loss<=1.5'$"),
        (
            {"repeat_stopped": False},
            'limit must be given with repeat_stopped=False: write for example limit="2min"$',
        ),
        (
            {"task": "1a"},
            "one of task, command and script must be given, not task and script: remove all but",
        ),
        ({"output": "train.py"}, "output must be a folder, not 'train.py': /.*train.py is a file"),
        ({"output": "train.py/out"}, "output must be a folder, not 'train.py/out': /.*train.py is"),
        ({"metrics": {"loss": object()}}, "metrics must have texts and numbers, not <object"),
        ({"algorithms": ["x"]}, "algorithms must be left out: give methods in place of it$"),
        ({"sedes": 3}, "key 'sedes' must be one that a sweep has: did you mean 'seeds'?"),
    ],
)
def test_an_error_names_the_argument_and_starts_nothing(
    folder: Path,
    say: Say,
    changed: dict[str, Any],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = say("")
    given = {"methods": ["as-is"], "output": "out", **GIVEN, **changed}
    with pytest.raises(ConfigurationError, match=f"^{message}"):
        experiments.compare(given.pop("methods"), **given)
    assert calls == [] and capsys.readouterr().err == ""


LINES = """
for line in ("started the master", "[1/2] a-longer-name: finished", "[2/2] b: finished"):
    sys.stderr.write(line + "\\n")
"""


def test_a_terminal_has_a_line_for_each_run(
    folder: Path, say: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    say(LINES)
    experiments.compare(["as-is"], **GIVEN, output="out")
    assert capsys.readouterr().err.splitlines() == [
        f"1 run, of which 0 are done: {folder / 'out'}",
        "started the master",
        "[1/2] a-longer-name: finished",
        "[2/2] b: finished",
    ]


def test_a_notebook_has_one_line_that_is_written_again(
    folder: Path, say: Say, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    say(LINES)
    experiments.compare(["as-is"], **GIVEN, output="out")
    shown = capsys.readouterr()
    assert shown.err == ""
    assert shown.out.splitlines(keepends=True)[1:] == [
        "started the master\n",
        "\r",
        "[1/2] a-longer-name: finished\r",
        # Blanks cover the rest of the longer line.
        f"{'[2/2] b: finished':<29}\n",
    ]


def test_an_error_of_the_command_is_an_exception(
    folder: Path, say: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    say("sys.exit('mlbench: 1 of 1 runs failed (see out/failed): as-is-2-lan-1g-s42 (lost)')")
    with pytest.raises(MLBenchError, match=r"^1 of 1 runs failed \(see out/failed\): as-is-2"):
        experiments.compare(["as-is"], **GIVEN, output="out")
    assert "failed" not in capsys.readouterr().err, "the exception says it"


def test_an_interrupt_ends_the_command_once_and_in_order(
    folder: Path, say: Say, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    say(
        "signal.signal(signal.SIGINT, lambda *_: (sys.stderr.write('stopping\\n'), sys.exit(1)))\n"
        "sys.stderr.write('ready\\n'); time.sleep(60)"
    )
    show = experiments._Progress.__call__

    def interrupted(progress: Any, line: str) -> None:
        show(progress, line)
        if line == "ready":
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(experiments._Progress, "__call__", interrupted)
    # A shell lets the processes that it starts in the background ignore interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            experiments.compare(["as-is"], **GIVEN, output="out")
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err.splitlines()[1:] == [
        "ready",
        "stopping",
        f"the same call with output='{folder / 'out'}' continues",
    ]


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a sweep with two runs that have ended."""
    (tmp_path / "sweep.toml").write_text(
        'title = "<b>Methods</b> & more"\ntask = "1a"\nworkers = [2]\nnetworks = ["lan-1g"]\n'
        'algorithms = ["centralized_sgd", "power_sgd"]\n'
    )
    write_run(tmp_path / "runs" / "centralized-sgd-2-lan-1g-s42", epochs=4)
    write_run(tmp_path / "runs" / "power-sgd-2-lan-1g-s42", epochs=3, algorithm="power_sgd")
    # The page has tests of its own, and its figures take seconds.
    monkeypatch.setattr(page, "_figures", lambda *_: ([], {}, []))
    page.write_page(tmp_path)
    return tmp_path


def test_the_rows_are_those_of_the_folders_table(
    ended: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = experiments.Comparison(ended)
    assert as_texts(result.rows) == rows_of_csv(ended / "table.csv")
    assert len(result.rows) == 2
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert result.table == result.rows


def test_the_table_is_one_of_pandas_if_it_is_there(ended: Path) -> None:
    pytest.importorskip("pandas")
    result = experiments.Comparison(ended)
    assert list(result.table.columns) == list(result.rows[0])
    assert list(result.table["median_s"]) == [row["median_s"] for row in result.rows]


def test_a_notebook_shows_a_table_without_markup_of_names(ended: Path) -> None:
    html = experiments.Comparison(ended)._repr_html_()
    assert "<table>" in html and "power_sgd" in html
    assert "&lt;b&gt;Methods&lt;/b&gt; &amp; more" in html and "<b>Methods</b>" not in html
    lines = repr(experiments.Comparison(ended)).splitlines()
    assert lines[0].startswith("Network  Algorithm") and len(lines) == 4


def test_a_folder_without_ended_runs_says_so(ended: Path) -> None:
    shutil.rmtree(ended / "runs")
    result = experiments.Comparison(ended)
    said = "0 of 2 planned runs have ended. Some configurations have fewer seeds, or no run yet."
    assert repr(result).splitlines() == [said, f"results: {ended}"]
    html = result._repr_html_()
    assert said in html and "<table>" not in html and "tuned" not in html


def test_the_folder_is_copied_whole_and_never_over_another(ended: Path, tmp_path: Path) -> None:
    result = experiments.Comparison(ended)
    (ended / "current.json").write_text("{}")
    copy = result.to_folder(tmp_path / "copy")
    assert experiments.Comparison(copy).rows == result.rows
    assert (copy / "index.html").exists() and not (copy / "current.json").exists()
    with pytest.raises(ConfigurationError, match=r"path must be a new folder, not .*copy"):
        result.to_folder(copy)


def test_a_figure_that_is_missing_names_those_that_are_there(ended: Path) -> None:
    result = experiments.Comparison(ended)
    with pytest.raises(ConfigurationError, match=r"not 'time': .*'mlbench-core\[charts\]'"):
        result.figure("time")
    (ended / "time_to_goal.svg").write_text("<?xml version='1.0'?><svg></svg>")
    with pytest.raises(ConfigurationError, match=r"not 'time': they are time_to_goal"):
        result.figure("time")
    assert result.figure("time_to_goal")._repr_svg_() == "<svg></svg>"


def test_the_module_is_loaded_on_first_use_and_loads_nothing_heavy() -> None:
    code = (
        "import sys, mlbench_core; assert 'mlbench_core.experiments' not in sys.modules; "
        "mlbench_core.experiments.compare; "
        "print({'torch', 'matplotlib', 'pandas'} & {*sys.modules})"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "set()\n"
