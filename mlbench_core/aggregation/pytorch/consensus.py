"""Compute the distance between the workers' weights, and their average."""

from __future__ import annotations

import copy
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mlbench_core import torch_private
from mlbench_core.aggregation.pytorch.aggregation import parameters_of
from mlbench_core.aggregation.pytorch.all_reduce import AVG_WORLD, AllReduceAggregation
from mlbench_core.distributed.pytorch import process_groups
from mlbench_core.distributed.pytorch.lost_workers import naming_lost_workers
from mlbench_core.distributed.pytorch.timing import CommunicationClock, uncounted
from mlbench_core.processor_time import work_s

__all__ = ["average_weights", "averaged_weights", "consensus_distance"]

# Integers by the bytes of an element.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def consensus_distance(model: nn.Module | Mapping[str, Tensor], process_group: Any = None) -> float:
    r"""Measure how far the workers' weights are from their average.

    .. math:: \sqrt{\frac{1}{k} \sum_{i=1}^{k} \|x_i - \bar x\|^2}, \qquad \bar x = \frac{1}{k}
      \sum_{i=1}^{k} x_i.

    Every worker must call it. The weights do not change. It sends as many numbers as one average of
    the weights, in float64.

    Args:
        model: The model, or a mapping from names to parameters. All parameters count, also frozen
            ones.
        process_group: The workers that take part; None for all.

    Returns:
        The distance, the same on every worker; 0 for a single worker.

    Example:
        >>> consensus_distance(nn.Linear(2, 1))
        0.0
    """
    # In float64, because in float32 the rounding of an average of nearly equal weights may be as
    # large as their difference.
    weights, average = {}, {}
    for name, weight in parameters_of(model).items():
        weights[name] = weight.detach().to(torch.promote_types(weight.dtype, torch.float64))
        average[name] = weights[name].clone()
    # Neither this nor the average below is a part of a training step, whose
    # collectives the tracker counts.
    with uncounted():
        AllReduceAggregation(None, process_group=process_group).aggregate(average, AVG_WORLD)
    # Each worker knows only its own distance, so the mean of the squares needs one
    # more number from every worker.
    squared = sum(float((weights[name] - average[name]).abs().square().sum()) for name in weights)
    return float(process_groups.global_average(squared, 1, process_group).sqrt())


def average_weights(model: nn.Module, process_group: Any = None, tracker: Any = None) -> None:
    """Replace all weights and floating-point buffers of every worker by their average.

    Use it to evaluate the average, for example.

    Frozen parameters are averaged too, because workers may have frozen them at different values.
    Every worker must call it.

    Args:
        model: The model.
        process_group: The workers that take part; None for all.
        tracker: A tracker, to whose training time the average is charged if the parameters of the
            workers differ; None to charge nobody. See :func:`averaged_weights`.

    Example:
        >>> average_weights(nn.Linear(2, 1))
    """
    tensors = {}
    for name, tensor in (*parameters_of(model).items(), *model.named_buffers()):
        # Counters, such as BatchNorm's num_batches_tracked, are integers, of
        # which an average makes no sense.
        if tensor.is_floating_point() or tensor.is_complex():
            tensors[name] = tensor.detach()
    aggregation = AllReduceAggregation(None, process_group=process_group)
    # All workers leave this comparison at the same time, so the clock below
    # does not measure who came late.
    is_charged = tracker is not None and _workers_differ(model, process_group)
    with torch.no_grad(), naming_lost_workers():
        if not is_charged:
            with uncounted():
                aggregation.aggregate(tensors, AVG_WORLD)
            return
        _wait_for_gpu(tensors)
        before_s, cpu_before_s = time.perf_counter(), work_s()
        aggregation.aggregate(tensors, AVG_WORLD)
        _wait_for_gpu(tensors)
        # A GPU does the work there, and this thread only waits.
        cpu_s = None
        if not any(tensor.is_cuda for tensor in tensors.values()):
            cpu_s = work_s() - cpu_before_s
    elapsed_s = time.perf_counter() - before_s
    tracker.charge_validation_average(elapsed_s, aggregation.bytes_sent, cpu_s=cpu_s)
    # It passes on the collectives that were counted.
    CommunicationClock().report(tracker)


def _workers_differ(model: nn.Module, process_group: Any) -> bool:
    """Return True if a parameter has other bits on another worker; the same on all workers."""
    if process_groups.world_size(process_group) == 1:
        return False
    sums = []
    for parameter in parameters_of(model).values():
        values = parameter.detach()
        if values.is_complex():
            values = torch.view_as_real(values)
        # A sum of integers is exact in any order.
        bits = values.contiguous().view(_INTEGERS[values.element_size()])
        sums.append(int(bits.sum(dtype=torch.int64)))
    own = zlib.crc32(repr(sums).encode())
    # The maximum of the negated numbers shows the minimum, so one message compares all workers.
    extremes = process_groups.get_backend_tensor(torch.tensor([own, -own]), process_group)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=process_group)
    highest, lowest = extremes.tolist()
    return bool(highest != -lowest)


def _wait_for_gpu(tensors: Mapping[str, Tensor]) -> None:
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.synchronize(device)


@contextmanager
def averaged_weights(
    model: nn.Module, process_group: Any = None, tracker: Any = None
) -> Iterator[nn.Module]:
    """Give every worker the average of all weights and floating-point buffers for a validation.

    After the block, even if it raises an exception, each worker has its own values again, bit for
    bit: all parameters, all buffers (persistent or not) and the values of ``get_extra_state``. So
    training continues as without the validation. Every worker must enter the block.

    The average changes equal values only by rounding. If training averages gradients, the weights
    are equal on all workers. The running statistics of BatchNorm are not, because each worker
    computes them from its own batches.

    With a tracker, an average that the validation needs is a part of training: if the parameters of
    the workers differ, its time, its bytes and its collectives count as exposed communication.
    Otherwise, a method that exchanges nothing would get the average of its workers for nothing. If
    the parameters have the same bits on all workers, nothing is charged; averaging the buffers then
    belongs to the validation.

    Args:
        model: The model.
        process_group: The workers that take part; None for all.
        tracker: The tracker of this worker, or None to charge nobody. Either all workers give one,
            or none does.

    Yields:
        The model.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> with averaged_weights(model) as average:
        ...     average is model
        True
    """
    if process_groups.world_size(process_group) == 1:
        yield model
        return
    # All values are saved, because a validation may also change values that are not averaged.
    parameters = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]
    buffers: list[tuple[nn.Module, str, Tensor | None, Tensor | None]] = []
    extra: list[tuple[nn.Module, Any]] = []
    for module in model.modules():
        for name, buffer in torch_private.buffers_of(module).items():
            # A registered buffer may be None.
            value = None
            if buffer is not None:
                value = buffer.detach().clone()
            buffers.append((module, name, buffer, value))
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            extra.append((module, copy.deepcopy(module.get_extra_state())))
    try:
        average_weights(model, process_group, tracker)
        yield model
    finally:
        with torch.no_grad():
            for parameter, weights in parameters:
                parameter.copy_(weights)
            for module, name, buffer, value in buffers:
                if buffer is not None and value is not None:
                    buffer.copy_(value)
                # A validation may have replaced the tensor.
                torch_private.buffers_of(module)[name] = buffer
            for module, state in extra:
                module.set_extra_state(state)
