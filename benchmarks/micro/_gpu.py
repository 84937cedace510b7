"""What the scripts that time GPU kernels share: three clocks, interleaved blocks, and the limits of the card itself.

* ``wall``: seconds on the host from the first call of a block to the end of the last one's work. This is what a plain
  training loop feels; small kernels are bound here by how fast Python starts them.
* ``gpu``: seconds between two CUDA events. A kernel that only waits goes first and holds the GPU until the host has
  queued everything, so that the gaps in which the GPU would wait for Python do not count.
* ``graph``: seconds between two events around the replay of a CUDA graph, in which Python has no part at all.

Work is a sequence of calls on different tensors that follow one another round and round: enough of them that nothing a
call needs can still lie in the GPU's cache from the round before. On a CPU there is only ``wall``, which says nothing
of a GPU; it is for trying the scripts.
"""

from __future__ import annotations

import argparse
import csv
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from _sections import machine

from mlbench_core.ops.pytorch import extension

CLOCKS = ("wall", "gpu", "graph")
CPU_NOTE = "This is a CPU: the script runs, the times say nothing about the kernels."
WARM_UP_ROUNDS = 3


class Work(NamedTuple):
    """What to time.

    Attributes:
        calls: Calls that do the same on different tensors.
        around: Makes the context in which they run, which is entered and left outside of what is timed.
    """

    calls: Sequence[Callable[[], object]]
    around: Callable[[], AbstractContextManager[object]] = nullcontext

    def __call__(self, rounds: int = 1) -> None:
        """Do all of it so many times."""
        for _ in range(rounds):
            for call in self.calls:
                call()


@dataclass
class Timing:
    """Seconds of one call, by clock, in each block; a clock that could not be used is not in it.

    Attributes:
        seconds: By clock.
        notes: Why a clock is missing, by clock.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def median(self, clock: str) -> float | None:
        """The median over the blocks; None without that clock."""
        return median(self.seconds[clock]) if self.seconds.get(clock) else None

    def best(self) -> float:
        """The median by the clock that shows the kernels alone best: events, or the wall clock where there is none."""
        found = self.median("gpu")
        return found if found is not None else median(self.seconds["wall"])


@dataclass(frozen=True)
class Limits:
    """What this device reaches at most, measured in the same run.

    Attributes:
        copy_bytes_per_s: Bytes read and written in a second by copying a large tensor.
        matrix_flops_per_s: Floating-point operations in a second of a large matrix product, by dtype.
    """

    copy_bytes_per_s: float
    matrix_flops_per_s: dict[torch.dtype, float]

    def sentence(self) -> str:
        """Both in words."""
        rates = ", ".join(f"{rate / 1e12:.3g} TFLOP/s in {short(d)}" for d, rate in self.matrix_flops_per_s.items())
        return (
            f"Copying a large tensor reaches {self.copy_bytes_per_s / 1e9:,.0f} GB/s, a large matrix product {rates}."
        )


def short(dtype: torch.dtype) -> str:
    """``"float16"`` for ``torch.float16``."""
    return str(dtype).removeprefix("torch.")


def pick_device(name: str, script: str) -> torch.device | None:
    """The device to measure on; None, after one line that says so, where there is no GPU.

    On a GPU the kernels are turned on: their times are what the scripts are for.
    """
    if name != "cuda":
        print(CPU_NOTE)
        return torch.device(name)
    if not torch.cuda.is_available():
        print(f"{script}: nothing measured, torch finds no CUDA GPU here. `--device cpu` tries the script itself.")
        return None
    os.environ.setdefault(extension.VARIABLE, "1")
    return torch.device("cuda", torch.cuda.current_device())


def where(device: torch.device) -> str:
    """Device and software in words."""
    if device.type != "cuda":
        return machine()
    return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}; {machine()}"


def sets_of_inputs(bytes_of_a_set: float, device: torch.device) -> int:
    """How many sets of tensors calls must take turns with so that a set has left the cache when its turn comes."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return 1 + int(2 * cache / bytes_of_a_set)


def measure(
    ways: Mapping[str, Work], device: torch.device, *, blocks: int, rounds: int
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Time every way by every clock, the ways taking turns.

    Args:
        ways: What to time, by name.
        device: Where it runs.
        blocks: How many times each way has a turn; the order changes from block to block.
        rounds: Rounds of a way's work in a turn.

    Returns:
        The timings, and why those ways that raised a RuntimeError when they were first tried have none.
    """
    clocks, timings, refused = {}, {}, {}
    for name, work in ways.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                clocks[name], timings[name] = _clocks(work, device, rounds)
            except RuntimeError as error:
                refused[name] = first_line(error, caught)
    for block in range(blocks):
        for name in list(clocks) if block % 2 else list(clocks)[::-1]:
            for clock, seconds in clocks[name].items():
                timings[name].seconds.setdefault(clock, []).append(seconds())
    return timings, refused


def first_line(error: BaseException, caught: Sequence[warnings.WarningMessage] = ()) -> str:
    """Why something was refused, in one line: torch puts the reasons of attention backends into warnings."""
    reasons = [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
    told = [str(error).strip() or type(error).__name__, *(r for r in reasons if "because" in r or "not" in r)]
    lines = [" ".join(text.splitlines()[0].split("(Triggered")[0].split()) for text in told]
    return "; ".join(line[:150] for line in dict.fromkeys(lines))


def _clocks(work: Work, device: torch.device, rounds: int) -> tuple[dict[str, Callable[[], float]], Timing]:
    """Warm up, and make what reads each clock once."""
    with work.around():
        work(WARM_UP_ROUNDS)
    timing = Timing()
    clocks: dict[str, Callable[[], float]] = {"wall": lambda: wall_seconds(work, device, rounds)}
    if device.type == "cuda":
        clocks["gpu"] = lambda: event_seconds(work, rounds)
        try:
            replay = Replay(work, device)
            clocks["graph"] = lambda: replay.seconds(rounds)
        except RuntimeError as error:
            timing.notes["graph"] = first_line(error)
    return clocks, timing


def wall_seconds(work: Work, device: torch.device, rounds: int) -> float:
    """Seconds of a call by the host's clock."""
    with work.around():
        _synchronize(device)
        start = time.perf_counter()
        work(rounds)
        _synchronize(device)
        return (time.perf_counter() - start) / (rounds * len(work.calls))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def event_seconds(work: Work, rounds: int) -> float:
    """Seconds of a call on the GPU, which is held until the host has queued all calls."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with work.around():
        host_s = _queueing_seconds(work) * rounds
        # Cycles of a clock of at most 2 GHz: the GPU is held for one and a half times as long as the host will take.
        torch.cuda._sleep(int(1.5 * 2e9 * host_s))
        begin.record()
        work(rounds)
        end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / (rounds * len(work.calls))


def _queueing_seconds(work: Work) -> float:
    """Seconds the host takes to queue a round."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    queued_s = time.perf_counter() - start
    torch.cuda.synchronize()
    return queued_s


class Replay:
    """A round of work as a CUDA graph.

    Args:
        work: What to capture. It must have run before.
        device: The GPU.

    Raises:
        RuntimeError: The work cannot be captured, for instance because the host waits for a result in it.
    """

    def __init__(self, work: Work, device: torch.device) -> None:
        self.calls = len(work.calls)
        self.graph = torch.cuda.CUDAGraph()
        before, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        torch.cuda.synchronize(device)
        with work.around():
            with torch.cuda.stream(side):
                work()  # the first calls on a stream make workspaces
            torch.cuda.synchronize(device)
            try:
                with torch.cuda.graph(self.graph, stream=side):
                    work()
            except RuntimeError:
                _leave_failed_capture(before)
                raise
        self.graph.replay()

    def seconds(self, rounds: int) -> float:
        """Seconds of a call on the GPU."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(rounds):
            self.graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / (rounds * self.calls)


def _leave_failed_capture(stream: torch.cuda.Stream) -> None:
    """Go back to a stream, with a fresh state of the generator: the old one believes that a capture is under way."""
    torch.cuda.set_stream(stream)
    torch.cuda.synchronize(stream.device)
    generator = torch.cuda.default_generators[stream.device.index]
    fresh = torch.Generator(device=stream.device)
    fresh.manual_seed(generator.initial_seed())
    generator.graphsafe_set_state(fresh.graphsafe_get_state())


def measure_limits(device: torch.device, dtypes: Sequence[torch.dtype], blocks: int = 5) -> Limits:
    """Copy a large tensor and multiply large matrices; the median of the blocks counts."""
    on_gpu = device.type == "cuda"
    size, n = (1 << 30, 8192) if on_gpu else (1 << 20, 64)
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    copying = _median_seconds(lambda: target.copy_(source), device, blocks)
    rates = {}
    for dtype in dtypes:
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        rates[dtype] = 2 * n**3 / _median_seconds(partial(torch.matmul, a, b), device, blocks)
    return Limits(2 * size / copying, rates)


def _median_seconds(call: Callable[[], object], device: torch.device, blocks: int) -> float:
    timings, _ = measure({"call": Work([call])}, device, blocks=blocks, rounds=5)
    return timings["call"].best()


def times(rival: Timing, ours: Timing, clock: str) -> tuple[float, float, float] | None:
    """How many times as long a rival takes: median, least and largest ratio of the blocks; None without the clock."""
    pairs = list(zip(rival.seconds.get(clock, []), ours.seconds.get(clock, []), strict=False))
    if not pairs:
        return None
    ratios = [theirs / own for theirs, own in pairs]
    return median(ratios), min(ratios), max(ratios)


def timing_columns(timing: Timing, ours: Timing | None) -> dict[str, Any]:
    """Microseconds by each clock, and how many times ours that is."""
    row: dict[str, Any] = {}
    for clock in CLOCKS:
        seconds = timing.median(clock)
        row[f"{clock}_us"] = None if seconds is None else 1e6 * seconds
        ratio = None if ours is None else times(timing, ours, clock)
        if ratio is not None:
            row[f"{clock}_times"], row[f"{clock}_times_least"], row[f"{clock}_times_most"] = ratio
    return row | {f"no_{clock}": note for clock, note in timing.notes.items()}


def clock_of(rows: Iterable[Mapping[str, Any]]) -> str:
    """The clock that counts: the GPU's where there is one."""
    return "gpu" if any(row.get("gpu_us") is not None for row in rows) else "wall"


def text(value: float | None, form: str) -> str | None:
    """A number in a format; an empty cell without one."""
    return None if value is None else format(value, form)


def verdict(ratio: float, target: float | None, *, is_judged: bool = True) -> str:
    """A ratio beside what was aimed at, if anything was."""
    if target is None:
        return f"{ratio:.2f}"
    judgement = (": reached" if ratio >= target else ": missed") if is_judged else ""
    return f"{ratio:.2f} (target {target:g}{judgement})"


def write_csv(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """One line for each row; columns in the order in which they first come up."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; None is an empty cell."""
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [f"| {' | '.join('' if cell is None else str(cell) for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def add_arguments(parser: argparse.ArgumentParser, *, output: str) -> None:
    """What all scripts that time on a GPU take."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only tries the script")
    parser.add_argument("--blocks", type=int, default=7, help="turns of each way; the median counts")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of each way's work in a turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path(output), help="folder for CSV and plot")
    parser.add_argument("--append-results", action="store_true", help="write the section into RESULTS.md")
