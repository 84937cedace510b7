"""Average by sending half of the weights to one other worker in each step (push-sum)."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mlbench_core.aggregation.pytorch.aggregation import Denominator
from mlbench_core.aggregation.pytorch.decentralized import (
    DecentralizedAggregation,
    check_average,
    refuse_gradients,
)
from mlbench_core.aggregation.pytorch.transport.messages import by_dtype_and_device, in_blocks
from mlbench_core.aggregation.pytorch.transport.names import (
    check_keys,
    copies_by_plain_name,
    is_buffer,
)

__all__ = ["PushSumAggregation", "exponential_peers"]


class PushSumAggregation(DecentralizedAggregation):
    r"""Send half of the weights to one other worker, another one in each step.

    Worker :math:`i` has a sum :math:`x_i` and a push-sum weight :math:`w_i`, which starts at 1. It
    sends to one peer :math:`p_i(t)` in step :math:`t`, and each worker adds half of what arrives to
    half of its own:

    .. math::

        x_i &\leftarrow \frac{1}{2} \Bigl( x_i + \sum_{j: p_j(t) = i} x_j \Bigr), \qquad
        w_i \leftarrow \frac{1}{2} \Bigl( w_i + \sum_{j: p_j(t) = i} w_j \Bigr) \\
        z_i &= x_i / w_i.

    The tensors hold :math:`z_i` before and after a call, so gradients are those at :math:`z_i`.
    Their change between two calls is added to :math:`x_i`. The sums of :math:`x_i` and :math:`w_i`
    over the workers do not change, and without further changes, every :math:`z_i` approaches
    :math:`\sum_i x_i / k`.

    By default, worker i of k sends to :math:`i + 2^{t \bmod \lceil \log_2 k \rceil} \bmod k`, see
    :func:`exponential_peers`. Every worker then receives one message per step, so all :math:`w_i`
    stay 1 and :math:`z_i = x_i`. If k is a power of two, the workers have their exact average after
    :math:`\log_2 k` steps. With other ``peers``, some workers may receive several messages in a
    step and others none. Then :math:`z_i` approaches the average, and :math:`x_i` does not.

    Average the workers before you evaluate, with
    :func:`~mlbench_core.aggregation.pytorch.consensus.averaged_weights`. Unless all :math:`w_i` are
    1, the average of :math:`z_i` equals :math:`\sum_i x_i / \sum_i w_i` only as far as the workers
    agree.

    A step sends :math:`x_i` and :math:`w_i` to one worker: the bytes of the weights and
    floating-point buffers, and 4 bytes (8 if the first tensor is in float64). Tensors of at least
    8 MiB travel alone, and the smaller ones of the same dtype and device in one message. State: the
    number of steps; if the weights :math:`w_i` may differ from 1, also :math:`w_i` and
    :math:`x_i - z_i`.

    The authors' code sends no buffers, and no :math:`w_i` if all of them stay 1. Its weight decay
    acts on :math:`x_i`. Here it acts on :math:`z_i`, as the gradient does.

    Attributes:
        peers: As given, or the default.
        weight: :math:`w_i`.
        rank: This worker's number in the process group.
        neighbors: The workers that sent to this one in the last step.

    Args:
        peers: The ranks to which workers 0, 1, ... send, one sequence for each step. After the last
            sequence, the first one follows again. Give the same on all workers.
        use_cuda: See :class:`~mlbench_core.aggregation.pytorch.aggregation.Aggregation`.
        process_group: See
            :class:`~mlbench_core.aggregation.pytorch.all_reduce.AllReduceAggregation`.

    Raises:
        ValueError: A sequence has not one other rank for each worker, or a worker cannot reach all
            others.

    Example:
        >>> weights = {"x": torch.ones(2)}
        >>> PushSumAggregation().aggregate(weights, "avg_world")
        >>> weights["x"]
        tensor([1., 1.])

    References:
        M. Assran, N. Loizou, N. Ballas, M. Rabbat: Stochastic Gradient Push for Distributed Deep
        Learning. arXiv:1811.10792

        D. Kempe, A. Dobra, J. Gehrke: Gossip-Based Computation of Aggregate Information. FOCS 2003
        (push-sum).
    """

    _kind = "pair"
    _named_state = ("shifts",)
    _own_state = ("weight", "shifts")

    def __init__(
        self,
        peers: Sequence[Sequence[int]] | None = None,
        *,
        use_cuda: bool = False,
        process_group: Any = None,
    ) -> None:
        super().__init__(neighbors=(), use_cuda=use_cuda, process_group=process_group)
        if peers is None:
            self.peers = exponential_peers(self.world_size)
        else:
            self.peers = _check_peers(peers, self.world_size)
        ranks = list(range(self.world_size))
        # Each worker then receives one message in each step, and all weights stay 1.
        self._is_regular = all(sorted(row) == ranks for row in self.peers)
        # Not empty, so the workers do not compare their neighbors, which are not mutual here.
        self._weights = (0.5,)
        self._steps = 0
        self.weight = self._weight_before = 1.0
        # x_i - z_i by name.
        self._shifts: dict[str, Tensor] = {}
        # Names that were aggregated in the current step.
        self._done: set[str] = set()

    # Steps of different workers would diverge.
    agg_grad = refuse_gradients

    def aggregate(
        self,
        tensors: Mapping[str, Tensor],
        op: str,
        denom: Denominator | None = None,
        extra: Sequence[Tensor] = (),
    ) -> None:
        """Take one step of push-sum, in place.

        Calls with different names belong to one step, until a name returns.

        Args:
            tensors: :math:`z_i` by name, in the same order with the same shapes and dtypes on every
                worker.
            op: ``"avg_world"``.
            denom: Not used.
            extra: Tensors to average over all workers.

        Raises:
            UnknownOperationError: ``op`` is another one.
        """
        check_average(op)
        filled = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
        if self.world_size > 1 and filled:
            # A step may have a call for each layer, and one for parameters outside the model.
            if not self._done.isdisjoint(filled):
                self._steps, self._done = self._steps + 1, set()
                # All calls of a step use the weight from before the step, also after the first call
                # has received.
                self._weight_before = self.weight
            self._push(filled)
            self._done.update(filled)
        super().aggregate({}, op, denom, extra)

    def _push(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace z_i by x_i, send it, add the arrivals, and divide by the new weight."""
        row = self.peers[self._steps % len(self.peers)]
        self.neighbors = tuple(rank for rank, peer in enumerate(row) if peer == self.rank)
        first = next(iter(tensors.values()))
        # At least in float32, because half precision cannot hold a sum of many halves.
        dtype = torch.promote_types(first.dtype.to_real(), torch.float32)
        weight = torch.tensor([self._weight_before], dtype=dtype, device=first.device)
        if not self._is_regular:
            for name, tensor in tensors.items():
                if name in self._shifts:
                    tensor.add_(self._shifts[name].to(tensor.device))
                else:
                    tensor.mul_(self._weight_before)
        for kind in by_dtype_and_device([*tensors.values(), weight]):
            self._mix(kind)
        if self._is_regular:
            # Reading the weight, which is 1, would wait for a GPU.
            return
        self.weight = float(weight)
        for name, tensor in tensors.items():
            x_i = tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
            tensor.div_(self.weight)
            # A buffer such as a variance must stay positive, so its x_i is always w_i z_i.
            if not is_buffer(name):
                self._shifts[name] = x_i.sub_(tensor)

    def _average(self, x_i: Tensor, received: Sequence[Tensor]) -> None:
        """Replace a flat tensor by half of the sum of it and the received ones, in place."""
        dtype = torch.promote_types(x_i.dtype, torch.float32)
        for block, *others in zip(in_blocks(x_i), *map(in_blocks, received), strict=True):
            # Halves are exact, so values that are equal on two workers do not change.
            own = block.to(dtype).mul_(0.5)
            for x_j in others:
                own.add_(x_j.to(dtype), alpha=0.5)
            if own is not block:
                block.copy_(own)

    def _targets(self) -> Sequence[int]:
        """Return the one worker to which this step sends."""
        return (self.peers[self._steps % len(self.peers)][self.rank],)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, and with peers that change the weight, also own values.

        Returns:
            The number of steps under ``"steps"``. If the workers' weights may differ, this worker's
            weight under ``"weight"``, and x_i - z_i by parameter name under ``"shifts"``. It is
            empty before the first step.
        """
        steps = self._steps
        if self._done:
            # A step is counted only when the next one begins, but this state already includes it.
            steps += 1
        if not steps:
            return {}
        if self._is_regular:
            return {"steps": steps}
        return {"steps": steps, "weight": self.weight, "shifts": dict(self._shifts)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`; an empty state starts from zero.

        A worker without own values starts with weight 1 from its tensors.

        Raises:
            ValueError: It is another aggregation's state, or has a weight although all weights stay
                1 with these peers.
        """
        keys = ["steps"]
        if not self._is_regular:
            keys += self._own_state
        check_keys(self, state_dict, (), keys)
        self._steps, self._done = int(state_dict.get("steps", 0)), set()
        # shared_state() leaves an empty dictionary in place of the weight.
        self.weight = self._weight_before = float(state_dict.get("weight") or 1)
        self._shifts = copies_by_plain_name(state_dict.get("shifts", {}))


def exponential_peers(world_size: int) -> tuple[tuple[int, ...], ...]:
    r"""Return the ranks to which the workers send, for one step after another.

    In step t of :math:`\lceil \log_2 k \rceil`, worker i of k sends to :math:`i + 2^t \bmod k`.

    Args:
        world_size: Number of workers k.

    Example:
        >>> exponential_peers(4)
        ((1, 2, 3, 0), (2, 3, 0, 1))
    """
    rows = []
    for t in range((world_size - 1).bit_length()):
        rows.append(tuple((rank + 2**t) % world_size for rank in range(world_size)))
    return tuple(rows)


def _check_peers(peers: Sequence[Sequence[int]], world_size: int) -> tuple[tuple[int, ...], ...]:
    """Return the peers of each step, if they are other ranks and all workers reach each other."""
    rows = tuple(map(tuple, peers))
    reached = torch.eye(world_size)
    for row in rows:
        is_wrong = len(row) != world_size
        for rank, peer in enumerate(row):
            is_wrong = is_wrong or peer == rank or peer not in range(world_size)
        if is_wrong:
            raise ValueError(
                f"peers must have the {world_size} ranks to which workers 0 to {world_size - 1} "
                f"send, each to another one, not {reprlib.repr(row)}: give one such sequence for "
                "each step"
            )
        reached[list(range(world_size)), list(row)] = 1
    # Each product doubles the length of the paths, and none needs more than k edges.
    for _ in range(world_size.bit_length()):
        reached = (reached @ reached).clamp(max=1)
    # The weight of a worker that receives nothing would shrink to 0.
    if not reached.all():
        raise ValueError(
            f"peers must lead from each worker to all others, not {reprlib.repr(rows)}: add steps "
            "with the missing edges"
        )
    return rows
