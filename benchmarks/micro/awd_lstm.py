"""Training words per second of AWD-LSTM: forward pass, loss, backward pass and SGD step, on random words.

Three ways, from the same weights, in one process:

* the classical one, written anew in this file: a wrapper that makes a dropped copy of each recurrent weight before
  every call and sets it as the LSTM's weight, a mask over the whole embedding matrix, and masks expanded over time;
* our model with that wrapper around its LSTMs, which shows what the wrapper alone makes out;
* our model.

Blocks of the ways alternate, so a change of the machine's load meets all of them; the median of the ratios within a
block counts. The decoder's scores for each word of the vocabulary take most of the time: ``--vocabulary 100`` shows the
rest.

    python benchmarks/micro/awd_lstm.py [--preset full] [--gpu] [--append-results]
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F
from _sections import RESULTS, machine, update_section
from torch import Tensor, nn

from mlbench_core.distributed.pytorch.memory import keep_freed_memory
from mlbench_core.models.pytorch.language_models import LSTMLanguageModel, detached

CLASSICAL, WRAPPED, OURS = "classical: copies of weights, whole-matrix masks", "ours, copies of weights", "ours"
HEADING = "## `awd_lstm.py`: training a language model"
PRESETS = {
    "full": (400, 1150, 3, {"dropout": 0.4, "dropouth": 0.2, "dropouti": 0.65, "dropoute": 0.1, "wdrop": 0.5}),
    "small": (200, 400, 2, {"dropout": 0.2, "dropouth": 0.1, "dropouti": 0.2, "dropoute": 0.1, "wdrop": 0.1}),
}


class CopyingWeightDrop(nn.Module):
    """The usual wrapper: the parameter is renamed, and before each call a dropped copy gets its old name."""

    def __init__(self, module: nn.RNNBase, names: Sequence[str], dropout: float) -> None:
        super().__init__()
        self.module, self.names, self.dropout = module, names, dropout
        for name in names:
            raw = getattr(module, name)
            delattr(module, name)
            module.register_parameter(f"{name}_raw", nn.Parameter(raw.detach()))
            setattr(module, name, raw.detach().clone())

    def forward(self, *args: object) -> object:
        for name in self.names:
            raw = getattr(self.module, f"{name}_raw")
            setattr(self.module, name, F.dropout(raw, self.dropout, self.training))
        return self.module(*args)


class ClassicalModel(nn.Module):
    """The usual model around that wrapper."""

    def __init__(self, model: LSTMLanguageModel) -> None:
        super().__init__()
        self.model = model

    def _locked(self, x: Tensor, p: float) -> Tensor:
        if not self.training or p == 0:
            return x
        mask = x.new_empty(1, x.size(1), x.size(2)).bernoulli_(1 - p) / (1 - p)
        return x * mask.expand_as(x)

    def forward(self, words: Tensor, hidden: list) -> tuple[Tensor, list]:
        model = self.model
        weight = model.encoder.weight
        if self.training and model.dropoute > 0:
            keep = 1 - model.dropoute
            weight = weight.new_empty(weight.size(0), 1).bernoulli_(keep).expand_as(weight) / keep * weight
        x = self._locked(F.embedding(words, weight), model.drop_input.p)
        ends = []
        for number, (rnn, state) in enumerate(zip(model.rnns, hidden, strict=True), start=1):
            x, state = rnn(x, state)
            x = self._locked(x, model.drop_hidden.p if number < model.nlayers else model.drop_output.p)
            ends.append(state)
        return model.decoder(x.flatten(0, 1)), ends


def with_copies(model: LSTMLanguageModel) -> LSTMLanguageModel:
    """The model with the usual wrapper around its LSTMs."""
    for number, drop in enumerate(model.rnns):
        model.rnns[number] = CopyingWeightDrop(drop.module, drop.weights, drop.dropout)
    return model


def make_ways(arguments: argparse.Namespace, device: torch.device) -> dict[str, Callable[[], None]]:
    """A training step of each way; steps go on from where the last one ended, as in training."""
    ninp, nhid, nlayers, dropouts = PRESETS[arguments.preset]
    torch.manual_seed(0)
    model = LSTMLanguageModel(arguments.vocabulary, ninp, nhid, nlayers, tie_weights=True, **dropouts)
    models = {
        CLASSICAL: ClassicalModel(with_copies(copy.deepcopy(model))),
        WRAPPED: with_copies(copy.deepcopy(model)),
        OURS: model,
    }
    words = torch.randint(arguments.vocabulary, (arguments.bptt + 1, arguments.batch_size), device=device)
    return {name: make_step(way.to(device), model, words, arguments.bf16) for name, way in models.items()}


def make_step(way: nn.Module, model: LSTMLanguageModel, words: Tensor, bf16: bool) -> Callable[[], None]:
    """One training step."""
    optimizer = torch.optim.SGD(way.parameters(), lr=1.0)
    hidden = [(h.to(words.device), c.to(words.device)) for h, c in model.init_hidden(words.shape[1])]

    def step() -> None:
        nonlocal hidden
        optimizer.zero_grad()
        with torch.autocast(words.device.type, torch.bfloat16, enabled=bf16):
            scores, hidden = way(words[:-1], detached(hidden))
        F.cross_entropy(scores.float(), words[1:].flatten()).backward()
        nn.utils.clip_grad_norm_(way.parameters(), 0.25)
        optimizer.step()

    return step


def seconds_of(step: Callable[[], None], steps: int, device: torch.device) -> float:
    """Time of some steps, the device's work included."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize()
    return time.perf_counter() - start


def measure(arguments: argparse.Namespace, device: torch.device) -> dict[str, list[float]]:
    """Words per second of each way in each block, after one block that warms up."""
    ways = make_ways(arguments, device)
    words = arguments.batch_size * arguments.bptt * arguments.steps
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for block in range(arguments.blocks + 1):
        order = list(ways.items()) if block % 2 else list(ways.items())[::-1]
        for name, step in order:
            speed = words / seconds_of(step, arguments.steps, device)
            if block:
                speeds[name].append(speed)
    return speeds


def report(speeds: dict[str, list[float]], arguments: argparse.Namespace, device: torch.device) -> str:
    """The text of the section."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} thread(s)"
    lines = [
        f"Preset {arguments.preset}, {arguments.vocabulary:,} words, batches of {arguments.batch_size} x "
        f"{arguments.bptt}{', bfloat16' if arguments.bf16 else ''}; {where}; {arguments.blocks} alternating blocks of",
        f"{arguments.steps} steps. Limit: ours at least as fast as either other way (on a GPU 1.3 times).",
        f"{machine()}; {date.today()}.",
        "",
        "| way | words/s | range | times classical |",
        "|---|---|---|---|",
    ]
    for name, found in speeds.items():
        ratio = statistics.median(own / other for own, other in zip(found, speeds[CLASSICAL], strict=True))
        lines.append(
            f"| {name} | {statistics.median(found):,.0f} | {min(found):,.0f} to {max(found):,.0f} | {ratio:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="small")
    parser.add_argument("--vocabulary", type=int, default=33_278)
    parser.add_argument("--batch-size", type=int, default=20)
    parser.add_argument("--bptt", type=int, default=70)
    parser.add_argument("--steps", type=int, default=3, help="steps of a block")
    parser.add_argument("--blocks", type=int, default=9, help="blocks of each way; the median counts")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--bf16", action="store_true", help="forward and backward passes in bfloat16")
    parser.add_argument("--gpu", action="store_true", help="on the current GPU")
    parser.add_argument("--json", type=Path, help="where to write the words per second of each block")
    parser.add_argument("--append-results", action="store_true", help=f"update the section in {RESULTS.name}")
    arguments = parser.parse_args(argv)
    if arguments.gpu and not torch.cuda.is_available():
        parser.error("argument --gpu: there is no GPU here")
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    device = torch.device("cuda" if arguments.gpu else "cpu")
    speeds = measure(arguments, device)
    section = report(speeds, arguments, device)
    print(section)
    if arguments.json:
        arguments.json.write_text(json.dumps(speeds, indent=2))
    if arguments.append_results:
        update_section(RESULTS, HEADING, section)


if __name__ == "__main__":
    main()
