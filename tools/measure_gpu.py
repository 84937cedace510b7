"""Run the tests that need a GPU and take all timings of a GPU, within ten minutes.

``make gpu`` runs this script; docs/howto/gpus.md describes it. Nothing is installed or downloaded.
Each step runs in a separate process with a time limit, and the steps with the most valuable
results come first::

    probe -> build -> tests -> timings
      |        |        |         |
      |        `--------+---------+---> OUTPUT/steps/NAME.json   moved into place when the step ends
      `-> OUTPUT/environment.json   OUTPUT/results.json, table.md   written after each step

So a run that is killed keeps all steps that had ended. The next run leaves out the steps that
succeeded with the same sources, GPU and command."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MICRO = ROOT / "benchmarks" / "micro"
TASK_1A = "benchmarks/task1a_resnet20_cifar10/main.py"
ONE_PROCESS = (
    "--run_id", "gpu", "--hosts", "127.0.0.1", "--rank", "0", "--backend", "nccl", "--gpu",
)  # fmt: skip
FAST, GRAPHS = ("--channels-last", "--autocast", "bf16"), "--cuda-graphs"
PROBE_LIMIT_S = 40
LEAST_CAPABILITY = (8, 0)  # earlier GPUs only emulate bfloat16
TEST_PACKAGES = ("freezegun", "pytest", "pytest-mock", "scikit-learn")
KILLED = 128 + signal.SIGKILL
OUTPUT_KEPT = 20_000  # characters
SMI = (
    "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,"
    "temperature.gpu,power.draw,power.limit,memory.total"
)


@dataclass(frozen=True)
class Step:
    """A part of the run.

    Attributes:
        name: Name of its result file.
        title: What it does, for people.
        limit_s: Seconds after which it is killed.
        command: Arguments of Python; ``{results}`` becomes a folder whose JSON files are kept.
    """

    name: str
    title: str
    limit_s: int
    command: tuple[str, ...]

    @property
    def is_test(self) -> bool:
        return "pytest" in self.command


def make_steps(data: Path | None) -> list[Step]:
    """List the steps in their order; ``data`` is the folder of CIFAR-10, or None for the digits."""
    # pytest-timeout may be missing: each step has its own limit, and the setting of that plug-in is
    # only a warning.
    pytest = "-m pytest -o addopts= -W default::pytest.PytestConfigWarning -p no:cacheprovider"
    if importlib.util.find_spec("xdist"):
        # All tests of a file run in one process, because they share the results of its workers.
        # pytest-benchmark, if it is installed, warns that it is off in parallel runs.
        pytest += " -n 4 --dist loadfile -p no:benchmark"
    pytest += " -ra --import-mode=importlib --continue-on-collection-errors -m gpu"
    images = ["--dataset", "digits"]
    if data:
        # A part of CIFAR-10 is enough for the light goal only.
        images = ["--dataset", "cifar10", "--data", str(data), "--partial", "--light"]
    folders = [f"--root-{name}={{results}}/{name}" for name in ("dataset", "checkpoint", "output")]
    task_1a = (TASK_1A, *ONE_PROCESS, *folders, *images)
    language = "benchmarks/micro/awd_lstm.py --gpu --blocks 5 --steps 20 --bf16 --save {results}"
    optimizers = (
        "benchmarks/micro/optimizers.py --gpu --models mlp --workers 2 --blocks 5 "
        "--variants sgd sgd_overlap power2 sign ef_sign top1 choco qsgd --save {results}"
    )
    attention = "benchmarks/micro/attention.py --blocks 3 --save {results} --parts"
    score = "benchmarks/micro/attention_score.py --blocks 3 --lengths 50 --save {results}"
    return [
        Step("build", "compile the CUDA kernels", 70,
             ("-m", "mlbench_core.install_cuda_extensions")),
        Step("tests", "CUDA kernels, float16, device clocks, NCCL, memory, loaders, models", 150,
             (*pytest.split(), *find_gpu_tests(ROOT / "tests"))),
        Step("attention", "attention alone, against torch's", 45, (*attention.split(), "core")),
        Step("score", "GNMT's attention score", 45, tuple(score.split())),
        Step("task1a-graphs", "task 1a on one GPU, channels_last, bfloat16, CUDA graphs", 30,
             (*task_1a, *FAST, GRAPHS)),
        Step("task1a", "the same without graphs", 40, (*task_1a, *FAST)),
        Step("module", "the attention module with projections", 30,
             (*attention.split(), "module")),
        Step("task1a-compiled", "task 1a, compiled", 60, (*task_1a, *FAST, "--compile")),
        Step("language", "AWD-LSTM in bfloat16", 30, tuple(language.split())),
        Step("optimizers", "optimizers of two workers on one GPU, over Gloo", 60,
             tuple(optimizers.split())),
    ]  # fmt: skip


def find_gpu_tests(folder: Path) -> list[str]:
    """Return the test files with tests for a GPU.

    Collecting the others would need all of their packages.
    """
    mark = re.compile(r"^ *@?pytest\.mark\.gpu\b", re.MULTILINE)
    marked = []
    for path in sorted(folder.rglob("test_*.py")):
        if mark.search(path.read_text("utf-8")):
            marked.append(path.relative_to(folder.parent).as_posix())
    return marked


def read_project() -> dict[str, Any]:
    """Read pyproject.toml."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    return project


def list_requirements() -> list[str]:
    """List the requirements of the library and of the steps, except torch."""
    return [*read_project()["project"]["dependencies"], *TEST_PACKAGES]


def find_missing() -> list[str]:
    """Return the requirements that this machine and this Python do not meet, one sentence each."""
    missing = []
    for requirement in list_requirements():
        name = re.split(r"[<>=; ]", requirement, maxsplit=1)[0]
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            # With ";" it is a package of other versions of Python.
            if ";" not in requirement:
                missing.append(f"the Python package {name} must be installed for {sys.executable}")
    return [*missing, *find_missing_gpu()]


def find_missing_gpu() -> list[str]:
    """Return why torch cannot compute on a GPU, or not on a recent one."""
    try:
        import torch
    except ImportError as error:
        return [f"torch must be installed for {sys.executable}: {error}"]
    if torch.version.cuda is None:
        version = torch.__version__
        return [f"torch must be a build with CUDA, not {version}: install one, see pytorch.org"]
    if not torch.cuda.is_available():
        return [
            "torch must find an NVIDIA GPU, and it finds none: look at the output of nvidia-smi"
        ]
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < LEAST_CAPABILITY:
        return [
            f"the GPU must have compute capability 8.0 or later, not {major}.{minor}: "
            "use a newer one"
        ]
    return []


def describe() -> dict[str, Any]:
    """Describe the machine; called in a separate process, because a driver may hang."""
    if missing := find_missing():
        return {"missing": missing}
    import torch

    from mlbench_core.results.environment import describe_environment
    from mlbench_core.results.source_code import describe_checkout

    smi_lines = None
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", f"--query-gpu={SMI}", "--format=csv"]
        smi = subprocess.run(command, capture_output=True, text=True, timeout=20)
        smi_lines = smi.stdout.splitlines()
    return {
        "missing": [],
        "gpu": torch.cuda.get_device_name(),
        "nvidia-smi": smi_lines,
        "source": describe_checkout(ROOT),
        "environment": describe_environment(program=Path(__file__)),
    }


def run_limited(command: Sequence[str], limit_s: int, **options: Any) -> int:
    """Run a command in its own process group; return its exit status, ``KILLED`` at its limit."""
    # The program timeout ends the whole group at the limit even if this script was killed before.
    process = subprocess.Popen(
        ["timeout", "--signal=KILL", f"{limit_s}s", *command], cwd=ROOT, **options
    )
    try:
        status = process.wait()
    except BaseException:
        process.terminate()  # timeout passes the signal on to the group
        process.wait()
        raise
    return KILLED if status == -signal.SIGKILL else status


def probe() -> dict[str, Any]:
    """Return the description of the machine."""
    if shutil.which("timeout") is None:
        return {"missing": ["the program timeout must be on PATH: install the package coreutils"]}
    with tempfile.TemporaryFile("w+") as output:
        status = run_limited([sys.executable, __file__, "--probe"], PROBE_LIMIT_S, stdout=output)
        output.seek(0)
        text = output.read()
    if status == KILLED:
        problem = f"torch and the driver must answer within {PROBE_LIMIT_S} s: look at nvidia-smi"
        return {"missing": [problem]}
    if status != 0:
        return {"missing": ["the error above must be mended"]}
    # Libraries may print lines before.
    description: dict[str, Any] = json.loads(text.splitlines()[-1])
    return description


def run_step(step: Step, machine: dict[str, Any]) -> dict[str, Any]:
    """Run a step; return its result file's content."""
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory(prefix="mlbench-gpu-") as results:
        arguments = [part.replace("{results}", results) for part in step.command]
        command = [sys.executable, *arguments]
        log = Path(results, "output.txt")
        # A separate home, so that no master of the user receives these runs.
        environment = {**os.environ, "PYTHONPATH": search, "MLBENCH_HOME": f"{results}/home"}
        start = time.monotonic()
        with log.open("wb") as file:
            status = run_limited(
                command, step.limit_s, env=environment,
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            )  # fmt: skip
        seconds = time.monotonic() - start
        output = log.read_text("utf-8", errors="replace")
        files = {}
        for path in sorted(Path(results).rglob("*.json")):
            # A killed step may leave a file that was cut off while it was written.
            with contextlib.suppress(ValueError):
                files[path.relative_to(results).as_posix()] = json.loads(path.read_text("utf-8"))
    ended = "done"
    if status == KILLED and seconds >= step.limit_s:
        # A process that the system killed for its memory has the same status, but earlier.
        ended = "timed out"
    elif status != 0:
        ended = "failed"
    elif step.is_test and not re.search(r"\b\d+ passed", output):
        # pytest also succeeds if every test was skipped.
        ended = "failed"
    return {
        **key_of(step, machine),
        "title": step.title,
        "ended": ended,
        "exit_status": status,
        "seconds": round(seconds, 1),
        "limit_s": step.limit_s,
        "output": output[-OUTPUT_KEPT:],
        "files": files,
    }


def key_of(step: Step, machine: dict[str, Any]) -> dict[str, Any]:
    """Return the entries that an earlier result must share to be used again."""
    return {
        "step": step.name,
        "command": [*step.command],
        "gpu": machine["gpu"],
        "source": machine["source"],
    }


def read_result(folder: Path, step: Step) -> dict[str, Any] | None:
    """Return the last result of a step, or None."""
    try:
        result = json.loads((folder / "steps" / f"{step.name}.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return result if isinstance(result, dict) else None


def write(path: Path, content: Any) -> None:
    """Write a text, or a value as JSON, whole or not at all."""
    from mlbench_core.files import replacing

    # The temporary name is fixed, so a killed run leaves at most one of them.
    with replacing(path, path.with_name(f".{path.name}.tmp")) as temporary:
        text = content
        if not isinstance(content, str):
            text = json.dumps(content, indent=1, ensure_ascii=False)
        temporary.write_text(text.rstrip() + "\n", encoding="utf-8")


def write_report(folder: Path, steps: Sequence[Step], machine: dict[str, Any]) -> None:
    """Write results.json and table.md from the result files."""
    results = []
    lines = [f"# Results of make gpu on {machine['gpu']}", ""]
    lines += ["| step | result | s | summary |", "|---|---|---|---|"]
    for step in steps:
        result = read_result(folder, step)
        cells = "not run |  | "
        if result:
            results.append(result)
            cells = f"{result['ended']} | {result['seconds']} | {summarize(result)}"
        lines.append(f"| {step.name}: {step.title} | {cells} |")
    write(folder / "results.json", {"machine": machine, "steps": results})
    sys.path.insert(0, str(MICRO))
    import _bench

    sys.path.remove(str(MICRO))
    for result in results:
        for content in result["files"].values():
            if isinstance(content, dict) and content.keys() >= {"subject", "runs"}:
                lines += ["", f"## {content['title']}", "", _bench.markdown(content)]
    write(folder / "table.md", "\n".join(lines))


def summarize(result: dict[str, Any]) -> str:
    """Return a cell of a table: the figures of a task's run, or else the last line of output."""
    for name, content in result["files"].items():
        if name.endswith("/result.json"):
            goal, seconds = "goal not reached", content["goal"]["time_to_goal_s"]
            if seconds is not None:
                goal = f"goal after {seconds['slowest']:.2f} s"
            return f"{content['samples_per_s']:,.0f} samples/s, {goal}"
    for line in reversed(result["output"].splitlines()):
        if text := line.strip(" =|"):
            return text[:150].replace("|", "/")
    return ""


def run_all(steps: Sequence[Step], chosen: Sequence[Step], folder: Path, again: bool) -> int:
    """Run the chosen steps; return the exit status."""
    machine = probe()
    if machine["missing"]:
        print("make gpu cannot run here:", *machine["missing"], sep="\n  - ", file=sys.stderr)
        return 1
    write(folder / "environment.json", machine)
    failed = []
    for step in chosen:
        result = read_result(folder, step)
        is_same = result is not None and result.items() >= key_of(step, machine).items()
        if result is not None and is_same and result["ended"] == "done" and not again:
            print(f"{step.name}: done before", flush=True)
            continue
        print(f"{step.name}: {step.title}, at most {step.limit_s} s ...", flush=True)
        result = run_step(step, machine)
        write(folder / "steps" / f"{step.name}.json", result)
        write_report(folder, steps, machine)
        print(
            f"{step.name}: {result['ended']} after {result['seconds']} s. {summarize(result)}",
            flush=True,
        )
        if result["ended"] != "done":
            failed.append(step.name)
    write_report(folder, steps, machine)
    if failed:
        print(f"{folder}/table.md has the results; not done: {', '.join(failed)}")
        return 1
    print(f"{folder}/table.md has the results")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the steps, or print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--output", type=Path, default=ROOT / "gpu-results", metavar="FOLDER")
    add("--data", type=Path, metavar="FOLDER", help="files of CIFAR-10 (default: train on digits)")
    add("--only", nargs="+", metavar="STEP", help="run only these steps")
    add("--again", action="store_true", help="also run steps that are done")
    add("--dry-run", action="store_true", help="print the steps and run nothing")
    add("--probe", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.probe:
        print(json.dumps(describe()))
        return 0
    if args.data and not args.data.is_dir():
        parser.error(f"argument --data: must be a folder, not {args.data}")
    steps = chosen = make_steps(args.data.resolve() if args.data else None)
    if args.only:
        names = {step.name for step in steps}
        if unknown := set(args.only) - names:
            parser.error(
                f"argument --only: must be from {', '.join(sorted(names))}, "
                f"not {', '.join(sorted(unknown))}"
            )
        chosen = [step for step in steps if step.name in args.only]
    if args.dry_run:
        limit_s = PROBE_LIMIT_S
        for step in chosen:
            limit_s += step.limit_s
            print(f"{step.name:16} {step.limit_s:4} s  {step.title}")
            print(f"    python {shlex.join(step.command)}")
        print(f"At most {limit_s} s, with {PROBE_LIMIT_S} s to look at GPU.")
        return 0
    return run_all(steps, chosen, args.output.resolve(), args.again)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    raise SystemExit(main())
