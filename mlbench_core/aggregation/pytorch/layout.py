"""Agree on the parameters that travel, and compare the workers' models.

A message has one layout on all workers, whatever the flags of a parameter are on one of them. So a parameter that was
trainable once keeps its place in the messages, also while it is frozen::

                     first aggregation: it is trainable
    NEW ------------------------------------------------> TRAVELS
     |                                                       ^
     |  first aggregation: it is frozen                      |  one worker has trained it:
     +---------------------------------> FROZEN -------------+  all workers agree by a message

The models are compared once, by a hash in the first aggregation of their parameters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mlbench_core.distributed.pytorch import process_groups

__all__ = ["Layout", "compare", "takes_part"]


@dataclass
class Layout:
    """The parameters that travel in the messages of an aggregation, by name.

    Attributes:
        known: Names of all parameters that were seen.
        frozen: Those that no worker has trained, as far as the workers have agreed; they do not travel.
        trained: Those of them that this worker has trained since the workers agreed.
        new: Descriptions of parameters that the workers have not compared yet.
    """

    known: set[str] = field(default_factory=set)
    frozen: set[str] = field(default_factory=set)
    trained: set[str] = field(default_factory=set)
    new: list[str] = field(default_factory=list)

    def note(self, parameters: Mapping[str, Tensor]) -> None:
        """Describe new parameters, and note which frozen ones this worker has begun to train.

        Args:
            parameters: By name, in the order of registration.
        """
        for name, parameter in parameters.items():
            if name not in self.known:
                self.known.add(name)
                self.new.append(describe(name, parameter))
                if not takes_part(parameter):
                    self.frozen.add(name)
            elif name in self.frozen and takes_part(parameter):
                self.trained.add(name)

    def frozen_among(self, parameters: Mapping[str, Tensor]) -> list[str]:
        """Return the names of the parameters that do not travel, in order; of new ones, those that do not take part."""
        return [n for n, p in parameters.items() if n in self.frozen or (n not in self.known and not takes_part(p))]

    def admit(self, names: Iterable[str]) -> None:
        """Let frozen parameters travel from now on; all workers give the same."""
        self.frozen.difference_update(names)
        self.trained.difference_update(names)


def takes_part(parameter: Tensor) -> bool:
    """Return whether an optimizer may change a parameter: it is trainable, or has a gradient.

    Example:
        >>> takes_part(torch.zeros(1))
        False
    """
    # An optimizer uses a gradient also if its parameter was frozen after the backward pass.
    return parameter.requires_grad or parameter.grad is not None


def describe(name: str, parameter: Tensor) -> str:
    """Return the properties of a parameter that must be the same on all workers, as one line of JSON."""
    return json.dumps([name, list(parameter.shape), str(parameter.dtype), takes_part(parameter)])


def compare(described: Sequence[str], group: Any = None) -> None:
    """Raise an error on all workers if their parameters differ. One message of 16 bytes shows that they are equal.

    It is not a part of a training step, so it is not counted.

    Args:
        described: A line of :func:`describe` for each parameter, in order.
        group: The process group; None for all workers.

    Raises:
        ValueError: The parameters differ. The message names a worker, a parameter and the difference.
    """
    text = "\n".join(described).encode()
    if process_groups.is_same(text, group):
        return
    first, *others = [_parse(row) for row in _gather(text, group)]
    for rank, parameters in enumerate(others, start=1):
        if parameters != first:
            raise ValueError(
                f"model must have the same parameters on all workers, but {_difference(first, parameters, rank)}: "
                "build the model in the same way on every worker"
            )


def _gather(text: bytes, group: Any) -> list[bytes]:
    """Return the texts of all workers, in the order of ranks."""
    dist, size = process_groups.dist, process_groups.world_size(group)
    length = process_groups.get_backend_tensor(torch.tensor(len(text)), group)
    dist.all_reduce(length, op=dist.ReduceOp.MAX, group=group)
    padded = torch.tensor(list(text.ljust(int(length), b"\n")), dtype=torch.uint8)
    sent = process_groups.get_backend_tensor(padded, group)
    gathered = sent.new_empty(size, len(sent))
    dist.all_gather(list(gathered), sent, group=group)
    return [bytes(row.tolist()) for row in gathered.cpu()]


def _parse(text: bytes) -> dict[str, list[Any]]:
    """Return the properties of parameters by name."""
    return {name: properties for name, *properties in map(json.loads, filter(None, text.decode().split("\n")))}


def _difference(first: dict[str, list[Any]], other: dict[str, list[Any]], rank: int) -> str:
    """Describe the first difference between the parameters of worker 0 and of another one."""
    for name in (*first, *other):
        if name not in other:
            return f"worker 0 has {name!r}, and worker {rank} does not"
        if name not in first:
            return f"worker {rank} has {name!r}, and worker 0 does not"
        (shape, dtype, trains), (other_shape, other_dtype, other_trains) = first[name], other[name]
        if shape != other_shape:
            return f"{name!r} has the shape {tuple(shape)} on worker 0 and {tuple(other_shape)} on worker {rank}"
        if dtype != other_dtype:
            return f"{name!r} is {dtype} on worker 0 and {other_dtype} on worker {rank}"
        if trains != other_trains:
            return f"requires_grad of {name!r} is {trains} on worker 0 and {other_trains} on worker {rank}"
    position, ours, theirs = next((i, a, b) for i, (a, b) in enumerate(zip(first, other, strict=True)) if a != b)
    return f"parameter number {position} is {ours!r} on worker 0 and {theirs!r} on worker {rank}"
