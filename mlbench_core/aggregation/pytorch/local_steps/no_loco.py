"""Average with one other worker at a time, drawn at random, and step along the result (NoLoCo)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import SGD

from mlbench_core.aggregation.pytorch.all_reduce import AVG_WORLD
from mlbench_core.aggregation.pytorch.decentralized import DecentralizedAggregation
from mlbench_core.aggregation.pytorch.local_steps.elastic import ElasticAverage
from mlbench_core.aggregation.pytorch.local_steps.periodic import DiLoCoAggregation
from mlbench_core.arguments import check_finite_at_least_0, check_int

__all__ = ["NoLoCoAggregation", "draw_peer"]


class NoLoCoAggregation(DiLoCoAggregation):
    r"""Take outer steps along the average of two workers, which are drawn again for each call.

    Every worker :math:`i` has own slow weights :math:`\phi_i`, a momentum :math:`m_i`, and its
    current weights :math:`\theta_i`. A call shuffles the workers into pairs, see
    :func:`draw_peer`. With :math:`\bar{v}` the average of :math:`v_i` and :math:`v_j` of the peer
    :math:`j`,

    .. math::

        m_i &\leftarrow \mu m_i + \alpha \overline{(\theta - \phi)} +
            \gamma (\bar\phi - \phi_i) \\
        \phi_i &\leftarrow \phi_i + m_i, \qquad \theta_i \leftarrow \phi_i.

    With an odd number of workers, one of them is alone in each call; it is its own average. The
    terms with :math:`\gamma` add up to zero over the workers. So for any pairs, the averages of
    :math:`\phi_i` and :math:`m_i` over all workers are those of DiLoCo with heavy-ball momentum
    :math:`\mu` and learning rate :math:`\alpha`, as far as the gradients are the same. The workers'
    weights are never all equal from three workers on: average them before you evaluate, with
    :func:`~mlbench_core.aggregation.pytorch.consensus.averaged_weights`.

    Buffers, and parameters that were not given to :meth:`start`, are averaged with the peer,
    without an outer step. Such parameters take outer steps from then on. If a tensor of a pair is
    equal on both workers and neither has moved it, it takes no outer step.

    A call sends :math:`\theta_i - \phi_i` and :math:`\phi_i` to one worker: twice the bytes of the
    weights, and those of the buffers. Tensors of at least 8 MiB travel alone, the smaller ones in
    one message per dtype. State: :math:`\phi_i` and :math:`m_i`, which differ between workers, and
    the number of calls.

    In an elastic run, the pairs are drawn among the members of the round. A worker that joins, or
    that missed a round, receives :math:`\phi`, :math:`m` and the buffers of one other member, the
    donor. It takes its first outer step in the next round. A round is committed for all pairs or
    for none. If it is not committed, each :math:`\theta_i` is set to its :math:`\phi_i`. So a
    worker that dies costs all others at most the steps since the last round, and its own
    :math:`\phi_i` is lost.

    The paper calls this modified Nesterov momentum. Its formulas (2) and (3) have no look-ahead,
    and neither has the authors' code. In these formulas, :math:`\alpha` is the momentum and
    :math:`\beta` the outer learning rate. The code uses the outer learning rate also as
    :math:`\gamma`.

    Attributes:
        outer_lr: :math:`\alpha`.
        gamma: :math:`\gamma`.
        seed: As given.
        rounds: Number of calls, or in an elastic run, of committed rounds.
        outer_optimizer: SGD with learning rate 1 and momentum :math:`\mu`, whose momentum buffers
            are :math:`-m_i`.

    Args:
        world_size: Number of workers; None takes that of the process group.
        outer_lr: :math:`\alpha`, the weight of the average change.
        outer_momentum: :math:`\mu`.
        gamma: :math:`\gamma`, the weight with which a worker is drawn to the average of its pair.
        seed: Seed of the pairs, the same on all workers.
        process_group: See
            :class:`~mlbench_core.aggregation.pytorch.all_reduce.AllReduceAggregation`.
        elastic: Averages over workers that may die or join; None for the fixed workers of the
            process group.

    Raises:
        TypeError: A number has the wrong type.
        ValueError: A number is negative or not finite, or ``world_size`` is not the number of
            workers in the process group.

    Example:
        >>> import torch
        >>> weights = {"x": torch.zeros(1)}
        >>> aggregation = NoLoCoAggregation(outer_lr=0.5)
        >>> aggregation.start({"x": torch.nn.Parameter(weights["x"])})
        >>> weights["x"] += 1
        >>> aggregation.aggregate(weights, "avg_world")
        >>> weights["x"]
        tensor([0.5000])

    References:
        J. Kolehmainen, N. Blagoev, J. Donaghy, O. Ersoy, C. Nies: NoLoCo: No-all-reduce Low
        Communication Training Method for Large Models. arXiv:2506.10911
    """

    _own_state = ("shared", "outer_state")

    def __init__(
        self,
        world_size: int | None = None,
        *,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.5,
        gamma: float = 0.7,
        seed: int = 0,
        process_group: Any = None,
        elastic: ElasticAverage | None = None,
    ) -> None:
        check_finite_at_least_0("outer_lr", outer_lr)
        check_finite_at_least_0("outer_momentum", outer_momentum)
        check_finite_at_least_0("gamma", gamma)
        super().__init__(
            partial(SGD, lr=1.0, momentum=outer_momentum),
            world_size,
            process_group=process_group,
            elastic=elastic,
        )
        self.outer_lr = outer_lr
        self.gamma = gamma
        self.seed = check_int("seed", seed, least=0)
        self.rounds = 0
        self._pair = _PairAggregation(neighbors=(), process_group=process_group)

    def _average(
        self, outer_gradients: Mapping[str, Tensor], averages: Mapping[str, Tensor]
    ) -> None:
        """Average with this call's peer; set the outer gradients to what is added to -m."""
        # Copies, because the exchange overwrites them by the averages of the pair.
        means = {name: self._shared[name].detach().clone() for name in outer_gradients}
        slow = {f"phi of {name}": mean for name, mean in means.items()}
        if not self._exchange({**outer_gradients, **slow}, averages):
            for gradient in outer_gradients.values():
                gradient.zero_()
            return
        for name, gradient in outer_gradients.items():
            correction = self._shared[name] - means[name]
            gradient.mul_(self.outer_lr).add_(correction.to(gradient), alpha=self.gamma)

    def _exchange(self, values: Mapping[str, Tensor], averages: Mapping[str, Tensor]) -> bool:
        """Average with this call's peer; return False if this worker takes no outer step."""
        if self.elastic is not None:
            with self._counting_bytes_of(self.elastic):
                is_average = self.elastic.exchange_in_pairs(values, averages, self._draw)
            # The members must draw the same pairs. A joiner has missed rounds, but all agree on the
            # commits.
            self.rounds = self.elastic.membership.commits
            return is_average
        peer = self._draw(self._pair.rank, self.world_size)
        self.rounds += 1
        if peer is not None:
            self._pair.join(peer)
            self._delegate(self._pair, {**values, **averages}, AVG_WORLD)
        return True

    def _draw(self, rank: int, size: int) -> int | None:
        return draw_peer(rank, size, self.seed, self.rounds)

    def state_dict(self) -> dict[str, Any]:
        """Return DiLoCo's state, which here differs between workers, and the number of calls."""
        state = super().state_dict()
        if self.rounds:
            state["rounds"] = self.rounds
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`; an empty state starts from zero.

        A worker without own slow weights starts from its weights at the next step.

        Raises:
            ValueError: It is another aggregation's state.
        """
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "rounds"})
        self.rounds = int(state_dict.get("rounds", 0))


class _PairAggregation(DecentralizedAggregation):
    """Average with one worker at a time."""

    _kind = "pair"

    def join(self, peer: int) -> None:
        """Average with this worker from now on. The peer must join this worker before its call."""
        self.neighbors = (peer,)
        self._weights = (0.5,)


def draw_peer(rank: int, world_size: int, seed: int, round_: int) -> int | None:
    """Return the rank with which a worker forms a pair; None if it is alone.

    The ranks are shuffled, and each two that follow are a pair.

    Args:
        rank: Rank of the worker.
        world_size: Number of workers.
        seed: Seed, the same on all workers.
        round_: Number of the exchange; each has other pairs.

    Example:
        >>> [draw_peer(rank, 4, seed=0, round_=0) for rank in range(4)]
        [2, 3, 0, 1]
    """
    order = np.random.default_rng((seed, round_)).permutation(world_size).tolist()
    # Positions 2n and 2n + 1 differ in their last bit alone.
    position = order.index(rank) ^ 1
    # The last worker of an odd number is alone.
    if position >= world_size:
        return None
    return order[position]
