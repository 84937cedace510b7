"""Agree on the parameters that travel, and compare the workers' models.

A message has one layout on all workers, whatever the flags of a parameter are on one of them. So a
parameter that was trainable once keeps its place in the messages, also while it is frozen::

                     first aggregation: it is trainable
    NEW ------------------------------------------------> TRAVELS
     |                                                       ^
     |  first aggregation: it is frozen                      |  one worker has trained it:
     +---------------------------------> FROZEN -------------+  all workers agree by a message

The models are compared once, by a hash in the first aggregation of their parameters.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mlbench_core.distributed.pytorch import lost_workers, process_groups

__all__ = ["Layout", "start_comparing", "takes_part"]

# Number of comparisons that found a difference, by the ranks of the group;
# the same on all its workers.
_differences: Counter[tuple[int, ...]] = Counter()


@dataclass
class Layout:
    """The parameters that travel in the messages of an aggregation, by name.

    Attributes:
        known: Names of all parameters that were seen.
        frozen: Those that no worker has trained, as far as the workers have agreed; they do not
            travel.
        trained: Those of them that this worker has trained since the workers agreed.
        new: Descriptions of parameters that the workers have not compared yet.
        traveled: Names of parameters that traveled before a checkpoint. They may have been frozen
            since, at weights that differ between workers.
    """

    known: set[str] = field(default_factory=set)
    frozen: set[str] = field(default_factory=set)
    trained: set[str] = field(default_factory=set)
    new: list[str] = field(default_factory=list)
    traveled: set[str] = field(default_factory=set)

    def note(self, parameters: Mapping[str, Tensor]) -> None:
        """Describe new parameters, and note which frozen ones this worker has begun to train.

        Args:
            parameters: By name, in the order of registration.
        """
        for name, parameter in parameters.items():
            if name not in self.known:
                self.known.add(name)
                self.new.append(describe(name, parameter))
                if not takes_part(parameter) and name not in self.traveled:
                    self.frozen.add(name)
            elif name in self.frozen and takes_part(parameter):
                self.trained.add(name)

    def frozen_among(self, parameters: Mapping[str, Tensor]) -> list[str]:
        """Return the names that do not travel, in order; of new ones, those that take no part."""
        frozen = []
        for name, parameter in parameters.items():
            if name in self.frozen or (name not in self.known and not takes_part(parameter)):
                frozen.append(name)
        return frozen

    def admit(self, names: Iterable[str]) -> None:
        """Let frozen parameters travel from now on; all workers give the same."""
        self.frozen.difference_update(names)
        self.trained.difference_update(names)


def takes_part(parameter: Tensor) -> bool:
    """Return whether an optimizer may change a parameter: it is trainable, or has a gradient.

    Example:
        >>> import torch
        >>> takes_part(torch.zeros(1))
        False
    """
    # An optimizer uses a gradient also if its parameter was frozen after the backward pass.
    return parameter.requires_grad or parameter.grad is not None


def describe(name: str, parameter: Tensor) -> str:
    """Return a parameter's properties that all workers must share, as one line of JSON."""
    return json.dumps([name, list(parameter.shape), str(parameter.dtype), takes_part(parameter)])


def start_comparing(described: Sequence[str], group: Any = None) -> Callable[[], None]:
    """Begin to compare the parameters of all workers, by one message of 16 bytes.

    It is not a part of a training step, so it is not counted.

    Args:
        described: A line of :func:`describe` for each parameter, in order.
        group: The process group; None for all workers.

    Returns:
        A function that waits for the message. If the parameters differ, it raises a ValueError on
        all workers, which names a worker, a parameter and the difference.
    """
    text = "\n".join(described).encode()
    is_same = process_groups.start_comparing(text, group)

    def wait() -> None:
        is_alike = is_same()
        lost_workers.read_records(group)
        if is_alike:
            return
        first, *others = map(_parse, _gather(text, group))
        # The hashes differ, so at least one worker differs from worker 0.
        rank = 1
        # As lists, because dictionaries with the same entries in another order are equal.
        while list(others[rank - 1].items()) == list(first.items()):
            rank += 1
        difference = _difference(first, others[rank - 1], rank)
        raise ValueError(
            f"model must have the same parameters on all workers, but {difference}: "
            "build the model in the same way on every worker"
        )

    return wait


def _gather(text: bytes, group: Any) -> list[bytes]:
    """Return the texts of all workers, in the order of ranks."""
    # Through the store, because collective operations would mix with
    # messages that are on their way.
    store, size = process_groups.store(), process_groups.world_size(group)
    ranks = [process_groups.global_rank(rank, group) for rank in range(size)]
    # The number is part of the keys, so that a later comparison does not read these texts.
    _differences[tuple(ranks)] += 1
    prefix = f"mlbench models {ranks} {_differences[tuple(ranks)]}"
    store.set(f"{prefix} {process_groups.rank()}", text)
    texts = [store.get(f"{prefix} {rank}") for rank in ranks]
    store.set(f"{prefix} {process_groups.rank()} done", "")
    # The store ends with the process of worker 0, which may end right after the error.
    if process_groups.rank() == 0:
        store.wait([f"{prefix} {rank} done" for rank in ranks])
    return texts


def _parse(text: bytes) -> dict[str, list[Any]]:
    """Return the properties of parameters by name."""
    lines = filter(None, text.decode().split("\n"))
    return {name: properties for name, *properties in map(json.loads, lines)}


def _difference(first: dict[str, list[Any]], other: dict[str, list[Any]], rank: int) -> str:
    """Describe the first difference between the parameters of worker 0 and of another one."""
    for name in (*first, *other):
        if name not in other:
            return f"worker 0 has {name!r}, and worker {rank} does not"
        if name not in first:
            return f"worker {rank} has {name!r}, and worker 0 does not"
        (shape, dtype, trains), (other_shape, other_dtype, other_trains) = first[name], other[name]
        if shape != other_shape:
            return (
                f"{name!r} has the shape {tuple(shape)} on worker 0 and "
                f"{tuple(other_shape)} on worker {rank}"
            )
        if dtype != other_dtype:
            return f"{name!r} is {dtype} on worker 0 and {other_dtype} on worker {rank}"
        if trains != other_trains:
            return (
                f"requires_grad of {name!r} is {trains} on worker "
                f"0 and {other_trains} on worker {rank}"
            )
    # Both have the same parameters, so only the order differs.
    position, own_names, other_names = 0, list(first), list(other)
    while own_names[position] == other_names[position]:
        position += 1
    return (
        f"parameter number {position} is {own_names[position]!r} on worker 0 and "
        f"{other_names[position]!r} on worker {rank}"
    )
