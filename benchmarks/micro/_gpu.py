"""Time GPU kernels by three clocks, and measure the limits of the device, for the scripts of the
CUDA kernels.

* ``wall``: seconds on the host from the first call of a block to the end of the last one's work. A
  plain training loop takes this time; for small kernels it is bound by the time that Python needs
  to start them.
* ``gpu``: seconds between two CUDA events. A kernel that only waits goes first and holds the GPU
  until the host has queued all calls, so that gaps in which the GPU would wait for Python do not
  count. This clock gives the value of a row.
* ``graph``: seconds between two events around the replay of a CUDA graph, in which Python has no
  part.

Work is a sequence of calls on different tensors, repeated in turn. There are enough of them that
the GPU's cache no longer holds the tensors of a call when its turn comes again. On a CPU only the
wall clock exists; it serves to try the scripts."""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from _bench import Row, Subject, Timed, make_parser, measure, positive

from mlbench_core.ops.pytorch import extension

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
FORWARD, BOTH = "forward", "forward + backward"
WARM_UP_ROUNDS = 3


class Work(NamedTuple):
    """The work to time.

    Attributes:
        calls: Calls that do the same on different tensors.
        around: Makes the context in which they run. Entering and leaving it is not timed.
    """

    calls: Sequence[Callable[[], object]]
    around: Callable[[], AbstractContextManager[object]] = nullcontext

    def __call__(self, rounds: int = 1) -> None:
        """Do all of it ``rounds`` times."""
        for _ in range(rounds):
            for call in self.calls:
                call()


class Clocks:
    """Reads every clock once per call, as a variant of :func:`_bench.measure`.

    Args:
        work: The work to time.
        device: The device that runs it.
        rounds: Rounds of the work per reading.

    Raises:
        RuntimeError: From the first call, if the work is refused; with torch's reasons in one line.
    """

    def __init__(self, work: Work, device: torch.device, rounds: int) -> None:
        self.work, self.device, self.rounds = work, device, rounds
        self.is_ready, self.replay = False, None

    def __call__(self) -> Timed:
        if not self.is_ready:
            self._prepare()
        wall_s = wall_seconds(self.work, self.device, self.rounds)
        if self.device.type != "cuda":
            return Timed(wall_s)
        extra = {"wall µs": 1e6 * wall_s}
        if self.replay is not None:
            extra["graph µs"] = 1e6 * self.replay.seconds(self.rounds)
        return Timed(event_seconds(self.work, self.rounds), extra)

    def _prepare(self) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                with self.work.around():
                    self.work(WARM_UP_ROUNDS)
            except RuntimeError as error:
                raise RuntimeError(reason(error, caught)) from None
            if self.device.type == "cuda":
                try:
                    # Work that waits for a result cannot be captured; its other clocks are still
                    # valid.
                    self.replay = Replay(self.work, self.device)
                except RuntimeError as error:
                    print(f"no graph: {reason(error, caught)}", file=sys.stderr)
        self.is_ready = True


def reason(error: BaseException, caught: Sequence[warnings.WarningMessage] = ()) -> str:
    """Say in one line why work was refused: torch puts the reasons of attention backends into
    warnings."""
    texts = [
        str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)
    ]
    reasons = [
        str(error).strip() or type(error).__name__,
        *(t for t in texts if "because" in t or "not" in t),
    ]
    lines = [" ".join(text.splitlines()[0].split("(Triggered")[0].split()) for text in reasons]
    return "; ".join(line[:150] for line in dict.fromkeys(lines))


def wall_seconds(work: Work, device: torch.device, rounds: int) -> float:
    """Return the seconds of a call by the host's clock."""
    synchronize = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    with work.around():
        synchronize()
        start = time.perf_counter()
        work(rounds)
        synchronize()
        return (time.perf_counter() - start) / (rounds * len(work.calls))


def event_seconds(work: Work, rounds: int) -> float:
    """Return the seconds of a call on the GPU, which is held until the host has queued all
    calls."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with work.around():
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        # Calls only queue work, so this is the time of the host alone.
        queueing_s = (time.perf_counter() - start) * rounds
        torch.cuda.synchronize()
        # Cycles of a clock of at most 2 GHz: the GPU is held for one and a half times as long as
        # the host will take.
        torch.cuda._sleep(int(1.5 * 2e9 * queueing_s))
        begin.record()
        work(rounds)
        end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / (rounds * len(work.calls))


class Replay:
    """A round of work as a CUDA graph.

    Args:
        work: The work to capture. It must have run before.
        device: The GPU.

    Raises:
        RuntimeError: The work cannot be captured, for instance because the host waits for a result
            in it.
    """

    def __init__(self, work: Work, device: torch.device) -> None:
        self.calls = len(work.calls)
        self.graph = torch.cuda.CUDAGraph()
        before, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        torch.cuda.synchronize(device)
        with work.around():
            with torch.cuda.stream(side):
                work()  # the first calls on a stream allocate workspaces, which a capture must not
            torch.cuda.synchronize(device)
            try:
                with torch.cuda.graph(self.graph, stream=side):
                    work()
            except RuntimeError:
                _leave_failed_capture(before)
                raise
        self.graph.replay()

    def seconds(self, rounds: int) -> float:
        """Return the seconds of a call on the GPU."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(rounds):
            self.graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / (rounds * self.calls)


def _leave_failed_capture(stream: torch.cuda.Stream) -> None:
    """Return to a stream, with a fresh state of the generator: the old one believes that a capture
    is in progress."""
    torch.cuda.set_stream(stream)
    torch.cuda.synchronize(stream.device)
    generator = torch.cuda.default_generators[stream.device.index]
    fresh = torch.Generator(device=stream.device)
    fresh.manual_seed(generator.initial_seed())
    generator.graphsafe_set_state(fresh.graphsafe_get_state())


def pick_device(name: str, script: str) -> torch.device:
    """Return the device to measure on, and turn the kernels on if it is a GPU; end the script if
    there is none."""
    if name == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit(
                f"{script} needs a CUDA GPU, and torch finds none: `--device cpu` only tries "
                "the script"
            )
        # The kernels are off by default, as they are experimental; here they are the subject.
        os.environ.setdefault(extension.VARIABLE, "1")
        name = f"cuda:{torch.cuda.current_device()}"
    if why := extension.why_not():
        print(f"Ours runs its plain implementation: {why}.", file=sys.stderr)
    return torch.device(name)


def sets_of_inputs(bytes_of_a_set: float, device: torch.device) -> int:
    """Return the number of sets of tensors after which the first one has left the GPU's cache."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return 1 + int(2 * cache / bytes_of_a_set)


def run_pass(
    subject: Subject,
    case: str,
    works: Mapping[str, Work],
    device: torch.device,
    arguments: argparse.Namespace,
) -> list[Row]:
    """Measure one pass of all variants."""
    variants = {title: Clocks(work, device, arguments.rounds) for title, work in works.items()}
    return measure(subject, case, variants, arguments.blocks)


def limits(device: torch.device, dtypes: Sequence[torch.dtype]) -> str:
    """Measure the speeds of copying and of a matrix product, which bound every kernel, and put them
    into words."""
    size, n = (1 << 30, 8192) if device.type == "cuda" else (1 << 20, 64)
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))

    def seconds(call: Callable[[], object]) -> float:
        clocks = Clocks(Work([call]), device, 5)
        return median(clocks().seconds for _ in range(5))

    rates = [f"{2 * size / seconds(lambda: target.copy_(source)) / 1e9:,.0f} GB/s by copying"]
    for dtype in dtypes:
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        rate = 2 * n**3 / seconds(partial(torch.matmul, a, b))
        rates.append(f"{rate / 1e12:.3g} TFLOP/s by a matrix product in {short(dtype)}")
    return f"The device reaches {', '.join(rates)}."


def short(dtype: torch.dtype) -> str:
    """Return ``"float16"`` for ``torch.float16``."""
    return str(dtype).removeprefix("torch.")


def relative_errors(
    found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> dict[str, float]:
    """Return the largest errors of the output and of all gradients, relative to the largest number
    of each tensor."""
    output, *gradients = (
        float((x - y).abs().max() / y.abs().max()) for x, y in zip(found, expected, strict=True)
    )
    return {"error": output, "error of gradients": max(gradients)}


def make_gpu_parser(description: str | None) -> argparse.ArgumentParser:
    """Make a parser with the arguments of the scripts that time kernels."""
    parser = make_parser(description, blocks=7)
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu only tries the script"
    )
    parser.add_argument(
        "--rounds", type=positive, default=10, help="rounds of each variant's work in a block"
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float16"])
    parser.add_argument("--seed", type=int, default=0)
    return parser
