"""Capture the states in a checkpoint as plain values, and restore them."""

from __future__ import annotations

import logging
import random
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mlbench_core.aggregation.pytorch.transport.names import plain_name
from mlbench_core.checkpoint_names import BEST_NAME
from mlbench_core.distributed.pytorch import process_groups
from mlbench_core.errors import CheckpointError
from mlbench_core.evaluation.goals import AccuracyAfterTime, TimeToGoal

__all__ = [
    "MISFIT_ERRORS",
    "capture",
    "capture_optional",
    "capture_tracker",
    "own_part",
    "restore",
    "restore_model",
    "restore_optimizer",
    "restore_tracker",
    "rng_state",
    "set_rng_state",
]

_log = logging.getLogger("mlbench_core.controlflow.pytorch.checkpoint")

MISFIT_ERRORS = (RuntimeError, ValueError, LookupError, TypeError, AttributeError, OverflowError)
"""Exceptions of objects that receive a state with other entries than their own."""


def capture(name: str, target: Any) -> Any:
    """Return the state of an object as plain values."""
    if isinstance(target, torch.Generator):
        return {"generator": target.get_state()}
    if hasattr(target, "state_dict"):
        return _plain(target.state_dict(), name)
    if hasattr(target, "set_epoch") and hasattr(target, "epoch"):
        return {"epoch": int(target.epoch)}
    raise TypeError(
        f"{name} is a {type(target).__name__}; a checkpoint can hold objects with state_dict() "
        "and load_state_dict(), torch.Generator, and samplers with epoch and set_epoch()"
    )


def capture_optional(name: str, target: Any) -> Any:
    """Return the state of an object, or None for None."""
    if target is None:
        return None
    return capture(name, target)


def restore(path: Path, name: str, target: Any, state: Any) -> None:
    """Restore an object from the state that :func:`capture` returned."""
    if state is None:
        raise CheckpointError(
            f"the checkpoint {path} has no state of {name}; it was saved without one"
        )
    try:
        if isinstance(target, torch.Generator):
            target.set_state(state["generator"])
        elif hasattr(target, "load_state_dict"):
            _check_settings(target, state)
            target.load_state_dict(state)
        else:
            target.set_epoch(state["epoch"])
    except MISFIT_ERRORS as error:
        reason = str(error)
        # A KeyError has only the name of the entry as its text.
        if isinstance(error, KeyError):
            reason = f"it has no entry {error}"
        raise CheckpointError(
            f"the checkpoint {path} does not fit the {name} it is loaded into, which is of the "
            f"class {type(target).__name__}: {reason}"
        ) from error


def _check_settings(target: Any, state: Any) -> None:
    """Refuse the state of another kind of optimizer.

    torch would accept it, and fail in the first step. A newer torch may have settings that an older
    state lacks, so a state is refused only if each side has settings that the other lacks.

    Raises:
        ValueError: Both have settings that the other one lacks.
    """
    if not isinstance(state, Mapping):
        return
    groups, saved = getattr(target, "param_groups", None), state.get("param_groups")
    if not (isinstance(groups, list) and isinstance(saved, list) and groups and saved):
        return
    if not (isinstance(groups[0], Mapping) and isinstance(saved[0], Mapping)):
        return
    missing = sorted(groups[0].keys() - saved[0].keys())
    unknown = sorted(saved[0].keys() - groups[0].keys())
    if missing and unknown:
        raise ValueError(
            "it is the state of another optimizer, with the settings "
            f"{', '.join(map(str, unknown))} and without {', '.join(missing)}"
        )


def own_part(state: Mapping[str, Any], model: Any, optimizer: Any) -> dict[str, Any]:
    """Return the part of a worker's state that differs from the state of rank 0.

    If gradients are averaged, the part has the buffers of the model (such as BatchNorm's
    statistics) and the entries that the optimizer lists as its ``own_state``. If weights are
    averaged, with neighbors or periodically, or the workers train in subgroups, the part is the
    whole state.
    """
    world_size = process_groups.world_size()
    averages_weights = getattr(optimizer, "agg_grad", True) is False
    if averages_weights or getattr(optimizer, "world_size", world_size) != world_size:
        return dict(state)
    # Weights are equal on all workers here, so storing them once, with rank 0, is enough.
    part = {**state, "partial": True, "model": {}, "optimizer": None}
    if isinstance(model, torch.nn.Module):
        buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        part["model"] = {name: value for name, value in state["model"].items() if name in buffers}
    if state["optimizer"] is not None:
        own_keys = getattr(optimizer, "own_state", ())
        part["optimizer"] = {key: state["optimizer"].get(key, {}) for key in own_keys}
    return part


def restore_model(path: Path, model: Any, state: Mapping[str, Any]) -> None:
    """Restore a model from a state of :func:`capture`; either of them may be compiled."""
    # torch.compile adds a prefix to the names of parameters, so names are compared without it.
    names: dict[str, str] = {}
    if isinstance(model, torch.nn.Module):
        names = {plain_name(name): name for name in model.state_dict()}
    renamed = {names.get(plain_name(name), name): value for name, value in state.items()}
    restore(path, "model", model, renamed)


def restore_optimizer(
    path: Path, optimizer: Any, state: Mapping[str, Any], rank: int, lacks_parts: bool
) -> None:
    """Restore an optimizer, without the aggregation memory of another worker.

    The memory also does not fit if the number of workers differs. If the parts of other workers are
    missing, no worker restores its own aggregation memory.
    """
    saved = state["optimizer"]
    here = process_groups.world_size()
    then = here
    if "world_size" in state:
        then = state["world_size"]
    elif path.name == BEST_NAME:
        # Versions that did not save the number of workers saved only rank 0's file of the best
        # epoch.
        then = 1
    is_own = state["rank"] == rank and then == here and not lacks_parts
    if saved is not None and not is_own and hasattr(optimizer, "shared_state_dict"):
        # An error memory belongs to one worker's gradients; with those of another it would correct
        # the wrong error.
        shared = optimizer.shared_state_dict(saved)
        if _count_tensors(shared) < _count_tensors(saved):
            origin = f"worker {state['rank']} of {state.get('world_size', 'an unknown number')}"
            if lacks_parts:
                origin += ", without the parts of other workers"
            _log.warning(
                "the memory of the aggregation of %s is reset: the checkpoint %s is of %s, and "
                "this is worker %d of %d",
                type(optimizer).__name__, path, origin, rank, here,
            )  # fmt: skip
        saved = shared
    restore(path, "optimizer", optimizer, saved)


def _count_tensors(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(map(_count_tensors, value.values()))
    return int(isinstance(value, torch.Tensor))


_GOALS: dict[str, Any] = {kind.__name__: kind for kind in (AccuracyAfterTime, TimeToGoal)}
"""Goals that are plain data, by their names in checkpoints."""


def capture_tracker(tracker: Any) -> dict[str, Any]:
    """Return the state of a tracker, its goal and the id of its run."""
    state = None
    if hasattr(tracker, "state_dict"):
        state = _plain(tracker.state_dict(), "tracker")
    goal: Any = getattr(tracker, "goal", None)
    goal_state: dict[str, Any] | None = None
    if type(goal) in _GOALS.values():
        goal_state = {"kind": type(goal).__name__, "fields": _plain(asdict(goal), "tracker.goal")}
    elif goal is not None:
        # Any other goal is a function, which a checkpoint cannot hold: reading it would run code.
        goal_state = {"kind": "code"}
    run_id = _plain(getattr(tracker, "run_id", None), "tracker.run_id")
    return {"run_id": run_id, "state": state, "goal": goal_state}


def restore_tracker(path: Path, state: Mapping[str, Any], rank: int, tracker: Any) -> Any:
    """Return the tracker, or a new one, with the state that :func:`capture_tracker` took."""
    saved = state["tracker"]
    if saved is None or saved["state"] is None:
        if tracker is not None:
            tracker.current_epoch = state["epoch"]
        return tracker
    if tracker is None:
        from mlbench_core.tracking.tracker import Tracker

        tracker = Tracker([], saved["run_id"], rank, _restored_goal(path, saved.get("goal")))
    restore(path, "tracker", tracker, saved["state"])
    return tracker


def _restored_goal(path: Path, saved: Mapping[str, Any] | None) -> Any:
    """Return the goal of :func:`capture_tracker`, or None if it was a function of the script."""
    if saved is None:
        return None
    if saved["kind"] in _GOALS:
        return _GOALS[saved["kind"]](**saved["fields"])
    _log.warning(
        "the tracker of the checkpoint %s has no goal now, because code is not saved: "
        "set tracker.goal",
        path,
    )
    return None


_PLAIN = (
    torch.Tensor, torch.dtype, torch.device, torch.Size,
    str, bytes, bool, int, float, complex, type(None),
)  # fmt: skip


def _plain(value: Any, name: str) -> Any:
    """Return a copy that ``torch.load(weights_only=True)`` reads; subclasses become plain types."""
    if type(value) in _PLAIN or type(value) is torch.nn.Parameter:
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        copy = {}
        for key, item in value.items():
            # A key may be a subclass too, such as a member of an enumeration.
            copy[_plain(key, f"{name} key {key!r}")] = _plain(item, f"{name}[{key!r}]")
        if isinstance(value, OrderedDict):
            return OrderedDict(copy)
        if isinstance(value, Counter):
            return Counter(copy)
        return copy
    for sequence in (list, tuple, set):
        if isinstance(value, sequence):
            return sequence(_plain(item, f"{name}[{i}]") for i, item in enumerate(value))
    if isinstance(value, torch.Tensor):
        return value.as_subclass(torch.Tensor)
    if isinstance(value, str):
        return str.__str__(value)
    # A subclass of a number, such as a member of an enumeration, would need its class when it is
    # read.
    for scalar in (int, float):
        if isinstance(value, scalar):
            return scalar(value)
    raise TypeError(
        f"{name} is a {type(value).__module__}.{type(value).__qualname__}; a checkpoint holds "
        "tensors and plain Python values only, so that reading one never runs code: let "
        "state_dict() return only these"
    )


def rng_state() -> dict[str, Any]:
    """Return the states of the global random generators."""
    # Data sets and scripts draw from the global generator.
    numpy_state = np.random.get_state()  # noqa: NPY002
    _, keys, position, has_gauss, cached = numpy_state
    cuda_state = None
    # Reading the state of an unused GPU would initialize CUDA and take memory there.
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        cuda_state = torch.cuda.get_rng_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": cuda_state,
        "python": random.getstate(),
        # A tensor, because torch.load(weights_only=True) rejects NumPy arrays.
        "numpy": [
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore the states of the global random generators that :func:`rng_state` took."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    keys, position, has_gauss, cached = state["numpy"]
    numpy_state = ("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, cached)
    np.random.set_state(numpy_state)  # noqa: NPY002
