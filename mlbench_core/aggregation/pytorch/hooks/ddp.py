"""Aggregations as communication hooks of torch's DistributedDataParallel.

DistributedDataParallel (DDP) calls a hook with each flat bucket of gradients, in the order of their
indices, which is the same on all workers. The layout of the buckets changes after the first
backward pass, and again in a resumed run. So results must not depend on it::

    hook, buckets 0 to n-2:  keep the bucket, return a future
    hook, bucket n-1:        aggregate all buckets' gradients by name, in the order of registration;
                             then complete all futures, for which DDP waits

All collectives of a pass run in one call, in one order, and the state is kept by parameter name.
With ``AllReduceAggregation(overlap=True)``, each bucket is sent at once instead, and only the waits
come in the last call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from mlbench_core.aggregation.pytorch.aggregation import AVG_WORLD, Aggregation, refuse_complex
from mlbench_core.aggregation.pytorch.all_reduce import AllReduceAggregation, Transfer
from mlbench_core.aggregation.pytorch.decentralized import DecentralizedAggregation
from mlbench_core.aggregation.pytorch.transport.buckets import strides_of
from mlbench_core.aggregation.pytorch.transport.messages import divide
from mlbench_core.aggregation.pytorch.transport.names import by_plain_name, check_names
from mlbench_core.distributed.pytorch.lost_workers import naming_lost_workers

__all__ = ["DDPHookState", "as_ddp_hook", "check_combines_gradients"]


@dataclass
class _Arrived:
    """A bucket whose gradients are complete on this worker.

    Attributes:
        memory: DDP's flat tensor, which receives the result.
        gradients: By parameter, its part of the memory.
        future: Completed with the memory when that holds the result.
        transfer: Its message, if it was sent already.
        event: The point in the GPU's stream at which its gradients are complete; None on a CPU.
    """

    memory: Tensor
    gradients: dict[Tensor, Tensor]
    future: torch.futures.Future[Tensor]
    transfer: Transfer | None
    event: torch.cuda.Event | None


class DDPHookState:
    """The state of a communication hook; :func:`as_ddp_hook` makes it.

    Attributes:
        aggregation: The aggregation. It counts the bytes (``bytes_sent``) and has the error
            memories.

    Args:
        aggregation: See :func:`as_ddp_hook`.
        ddp_model: See :func:`as_ddp_hook`.
    """

    def __init__(self, aggregation: Aggregation, ddp_model: DistributedDataParallel) -> None:
        self.aggregation = aggregation
        self._aggregate = aggregation.agg_grad()
        # In the order of registration. Names without DDP's prefix "module."
        # are those that optimizers use.
        self._not_compared = by_plain_name(dict(ddp_model.module.named_parameters()))
        self._names = {parameter: name for name, parameter in self._not_compared.items()}
        refuse_complex(aggregation, self._not_compared)
        self._arrived: list[_Arrived] = []

    def state_dict(self) -> dict[str, Any]:
        """Return the aggregation's state by parameter name; each worker saves and loads its own."""
        return self.aggregation.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`, or an optimizer state's ``"aggregation"``.

        Raises:
            ValueError: The state is that of another aggregation or another model.
        """
        check_names(self.aggregation.remembered_names(state_dict), self._names.values())
        self.aggregation.load_state_dict(state_dict)

    @torch.no_grad()
    @naming_lost_workers()
    def _receive(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Take a bucket from DDP; the last one of a backward pass completes the pass."""
        # DDP gives the buckets of a pass in their order, so bucket 0 begins the pass.
        if bucket.index() == 0:
            self.aggregation.last_bytes = 0
            self.aggregation.compare_models(self._not_compared)
            self._not_compared = {}
        memory = bucket.buffer()
        if memory.layout != torch.strided:
            raise ValueError(
                "gradients must be dense (torch.strided), not "
                f"{memory.layout}: build the layer without sparse=True"
            )
        event: torch.cuda.Event | None = None
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        if memory.is_cuda:
            event = torch.cuda.current_stream(memory.device).record_event()
            # A future that is completed with a GPU tensor must name its device.
            future = torch.futures.Future(devices=[memory.device])
        gradients = dict(zip(bucket.parameters(), _gradients(bucket), strict=True))
        self._arrived.append(_Arrived(memory, gradients, future, self._start(memory), event))
        if bucket.is_last():
            arrived, self._arrived = self._arrived, []
            self._complete(arrived)
        return future

    def _start(self, memory: Tensor) -> Transfer | None:
        """Send the memory of a bucket, if messages overlap with the backward pass."""
        aggregation = self.aggregation
        if (
            not isinstance(aggregation, AllReduceAggregation)
            or not aggregation.overlap
            or aggregation.world_size == 1
        ):
            return None
        if aggregation.divides_early(memory.dtype):
            divide(memory, aggregation.world_size)
        return aggregation.start(memory, overlapped=True)

    def _complete(self, arrived: list[_Arrived]) -> None:
        """Write the results into the memory of all buckets and complete their futures."""
        for item in arrived:
            # Autograd may have computed the gradients of other buckets in other streams.
            if item.event is not None:
                item.event.wait()
            if item.transfer is not None:
                self._finish(item.transfer)
        # Either all buckets were sent during the pass, or none; see _start().
        if arrived[0].transfer is None:
            gradients: dict[Tensor, Tensor] = {}
            for item in arrived:
                gradients.update(item.gradients)
            self._aggregate_together(gradients)
        for item in arrived:
            item.future.set_result(item.memory)

    def _finish(self, transfer: Transfer) -> None:
        """Wait for the sum of a bucket and turn it into the average."""
        aggregation = self.aggregation
        assert isinstance(aggregation, AllReduceAggregation)
        aggregation.finish(transfer)
        if not aggregation.divides_early(transfer.message.dtype):
            divide(transfer.message, aggregation.world_size)

    def _aggregate_together(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Aggregate the gradients of all buckets in one call, in the memory of the buckets."""
        stand_ins = {}
        # In the order of registration, whatever the buckets are.
        for parameter, name in self._names.items():
            if parameter in gradients:
                # The parameter's own gradient may lie elsewhere: DDP copies the result there later.
                # It is None if the parameter took no part in this worker's pass. Then the bucket
                # has zeros, which must not count as a gradient: if no worker has one, DDP drops the
                # result, and the error memory that it holds with it.
                stand_in = gradients[parameter].detach().requires_grad_()
                if parameter.grad is not None:
                    stand_in.grad = gradients[parameter]
                stand_ins[name] = stand_in
        self._aggregate(stand_ins, AVG_WORLD)
        for parameter, view in gradients.items():
            result = stand_ins[self._names[parameter]].grad
            if parameter.grad is None and result is not None:
                view.copy_(result)


def _gradients(bucket: dist.GradBucket) -> list[Tensor]:
    """Return the gradients in a bucket, as views of its memory."""
    parameters, memory = bucket.parameters(), bucket.buffer()
    if memory.is_complex() or not any(parameter.is_complex() for parameter in parameters):
        return list(bucket.gradients())
    # DDP keeps complex numbers as pairs of real ones, but its own views count each pair as one
    # number. A bucket has parameters of one dtype.
    flat = torch.view_as_complex(memory.view(-1, 2))
    gradients = []
    parts = flat.split(list(map(torch.numel, parameters)))
    for part, parameter in zip(parts, parameters, strict=True):
        strides = strides_of(parameter)
        gradients.append(part.as_strided(parameter.shape, strides, part.storage_offset()))
    return gradients


def as_ddp_hook(
    aggregation: Aggregation, ddp_model: DistributedDataParallel
) -> tuple[DDPHookState, Any]:
    """Make a communication hook of DistributedDataParallel (DDP) that aggregates gradients.

    A script that trains with DDP and an optimizer of torch adds one line after the model::

        state, hook = as_ddp_hook(EFSignAggregation(), ddp_model)
        ddp_model.register_comm_hook(state, hook)

    or, in short, ``ddp_model.register_comm_hook(*as_ddp_hook(EFSignAggregation(), ddp_model))``.
    After ``backward()``, gradients are the results of the aggregation, the same as in this
    library's optimizer without overlap. The number and the layout of DDP's buckets change neither
    results nor messages. ``no_sync()``, ``find_unused_parameters``, ``static_graph`` and
    ``gradient_as_bucket_view`` work as without a hook.

    All aggregations of gradients can be used. ``AllReduceAggregation(overlap=True)`` sends each
    bucket while the backward pass still computes others, in DDP's buckets instead of those of
    ``bucket_size_bytes``. All others send their messages at the end of the backward pass.
    Aggregations of weights cannot be used, because a hook sees only gradients:
    DecentralizedAggregation, ChocoAggregation, PushSumAggregation, PeriodicAggregation,
    DESLOCAggregation, ScaffoldAggregation, DiLoCoAggregation, EagerDiLoCoAggregation,
    StreamingDiLoCoAggregation, SparseLoCoAggregation, NoLoCoAggregation and SPARTAAggregation.

    Complex gradients are averaged whole, real and imaginary parts, by AllReduceAggregation and
    PowerAggregation; other aggregations refuse them.

    To resume exactly, save ``state.state_dict()`` on every worker, besides the states of the model
    and the optimizer.

    Set gradients to None between steps, as ``optimizer.zero_grad()`` does by default. Zeros would
    count as the gradient of a parameter that took no part in the pass.

    Args:
        aggregation: An aggregation of the workers that train ``ddp_model``. If its constructor
            takes a model, give it ``ddp_model.module``.
        ddp_model: The model that the hook will be registered with. Hooks see no names, so it gives
            the names under which the state is kept.

    Returns:
        The two arguments of ``ddp_model.register_comm_hook``.

    Raises:
        TypeError: ``aggregation`` is not an aggregation, ``ddp_model`` is not a
            DistributedDataParallel, or it has complex parameters and the aggregation takes real
            ones only.
        ValueError: ``aggregation`` combines weights, or belongs to other workers than
            ``ddp_model``.

    References:
        S. Li et al.: PyTorch Distributed: Experiences on Accelerating Data Parallel Training,
        arXiv:2006.15704
    """
    check_combines_gradients(aggregation)
    if not isinstance(ddp_model, DistributedDataParallel):
        raise TypeError(
            "ddp_model must be a DistributedDataParallel, not "
            f"{type(ddp_model).__name__}: wrap the model first"
        )
    ours = dist.get_process_group_ranks(aggregation.group)
    theirs = dist.get_process_group_ranks(ddp_model.process_group)
    if ours != theirs:
        raise ValueError(
            f"process_group of the aggregation must have the workers {theirs} of "
            f"ddp_model, not {ours}: give both the same group"
        )
    return DDPHookState(aggregation, ddp_model), _hook


def check_combines_gradients(aggregation: Aggregation) -> None:
    """Raise an error if an aggregation cannot be a hook, which sees only gradients.

    Raises:
        TypeError: ``aggregation`` is not an aggregation.
        ValueError: It combines weights.
    """
    if not isinstance(aggregation, Aggregation):
        raise TypeError(
            "aggregation must be an Aggregation, not "
            f"{type(aggregation).__name__}: give its instance"
        )
    problem = (
        f"aggregation must combine gradients, not weights as {type(aggregation).__name__} does: a "
        "hook sees only gradients, so train without a hook, with the optimizer of this aggregation"
    )
    # Its neighbors' averages of gradients would differ, and the copies of the model, which a hook
    # never compares, with them.
    if isinstance(aggregation, DecentralizedAggregation):
        raise ValueError(problem)
    try:
        aggregation.agg_grad()
    except ValueError as error:
        raise ValueError(problem) from error


# DDP compares the annotations of a hook with types, which postponed ones are not.
def _hook(state, bucket):  # type: ignore[no-untyped-def]
    """Pass a bucket to the state; DDP calls it."""
    return state._receive(bucket)
