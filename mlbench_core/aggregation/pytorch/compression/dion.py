"""Turn gradients into orthonormal updates of low rank, from a momentum of each worker (Dion)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mlbench_core.aggregation.pytorch.aggregation import Denominator
from mlbench_core.aggregation.pytorch.all_reduce import AllReduceAggregation
from mlbench_core.aggregation.pytorch.compression.compressed import (
    LossyAggregation,
    flush_tiny_,
    orthonormal_rows,
    recall,
)
from mlbench_core.aggregation.pytorch.transport.names import check_keys, copies_by_plain_name
from mlbench_core.arguments import check_finite_at_least_0, check_int

__all__ = ["DionAggregation"]


class DionAggregation(LossyAggregation):
    r"""Replace gradients of matrices by an orthonormal matrix of low rank, and average all others.

    A tensor of two or more dimensions is viewed as a matrix with :math:`n` rows (its first
    dimension) and :math:`m` columns (all others). Worker :math:`i` of :math:`k` has a momentum
    :math:`M_i` of it, zeros at first. With the rank :math:`r = \min(n, m, \text{rank})` and a
    matrix :math:`Q \in \mathbb{R}^{m \times r}`, the same on all workers and random at first, a
    call computes

    .. math::

        B_i &= M_i + g_i \\
        P &= \operatorname{orthonormal}\Bigl(\frac{1}{k} \sum_i B_i Q\Bigr) \\
        R &= \frac{1}{k} \sum_i B_i^\top P \\
        M_i &\leftarrow B_i - (1 - \mu) P R^\top \\
        Q &\leftarrow R \text{ with columns of length 1}

    and the tensor becomes :math:`P Q^\top`, whatever the divisor of the operation is: it does not
    depend on the length of the gradients. The average of the :math:`M_i`, :math:`Q` and the result
    are those of one worker with the average gradient, for any number of workers. All other tensors
    are averaged as they are.

    A column of :math:`R` that is at most :math:`16 \varepsilon` times as long as the longest one,
    with :math:`\varepsilon` that of :func:`torch.finfo`, has rounding errors only. This direction
    takes no part in the update, and its column of :math:`Q` stays as it was.

    A call sends two messages: all :math:`P` together with the other tensors, then all :math:`R`. A
    worker sends :math:`r (n + m)` numbers per matrix, in float32 (float64 for gradients in
    float64), and the bytes of the other tensors. If a gradient is infinite or nan on one worker,
    the result is nan on all workers, and the momentum of that matrix starts again from zero.

    Implementations differ in the orthonormalization (QR with or without random projection in some,
    Gram-Schmidt here), which changes :math:`P` by signs only, and the result not at all.

    Attributes:
        rank: As given.
        momentum: As given.

    Args:
        use_cuda: See :class:`~mlbench_core.aggregation.pytorch.aggregation.Aggregation`.
        rank: Largest rank of an update, 1 or more. It is not the worker's number.
        momentum: :math:`\mu`, from 0 to 1: the share that stays of the part of the momentum that
            was used.
        seed: Seed of the first :math:`Q`; the same on all workers.
        world_size: Number of workers; None takes that of the process group.
        process_group: See
            :class:`~mlbench_core.aggregation.pytorch.all_reduce.AllReduceAggregation`.

    Raises:
        ValueError: A number is out of range, or ``world_size`` is not the number of workers in the
            process group.
        TypeError: ``rank`` or ``seed`` is not an integer, or ``momentum`` is not a number.

    Example:
        >>> aggregation = DionAggregation(rank=1)
        >>> gradient = torch.outer(torch.tensor([3.0, -4.0]), torch.ones(4))
        >>> aggregation.aggregate({"weight": gradient}, "avg_world")  # the gradient has rank 1
        >>> gradient.round(decimals=4)  # (0.6, -0.8) times (0.5, 0.5, 0.5, 0.5)
        tensor([[ 0.3000,  0.3000,  0.3000,  0.3000],
                [-0.4000, -0.4000, -0.4000, -0.4000]])

    References:
        K. Ahn, B. Xu, N. Abreu, J. Langford: Dion: Distributed Orthonormalized Updates.
        arXiv:2504.05295
    """

    averages_gradients = False

    _named_state = ("momentum", "queries")
    # Q must be the same on all workers. Only the momenta differ.
    _own_state = ("momentum",)

    def __init__(
        self,
        use_cuda: bool = False,
        *,
        rank: int = 8,
        momentum: float = 0.95,
        seed: int = 0,
        world_size: int | None = None,
        process_group: Any = None,
    ) -> None:
        super().__init__(
            AllReduceAggregation(world_size, use_cuda=use_cuda, process_group=process_group),
            use_cuda,
        )
        self.rank = check_int("rank", rank)
        check_finite_at_least_0("momentum", momentum)
        if momentum > 1:
            raise ValueError(
                f"momentum must be at most 1, not {momentum}: the momentum would grow without end"
            )
        self.momentum = momentum
        self._seed = check_int("seed", seed, least=0)
        self._queries: dict[str, Tensor] = {}

    @torch.no_grad()
    def aggregate(
        self,
        tensors: Mapping[str, Tensor],
        op: str,
        denom: Denominator | None = None,
        extra: Sequence[Tensor] = (),
    ) -> None:
        """Replace matrices by their orthonormal updates and average all other tensors, in place.

        Args:
            tensors: By name, in the same order with the same shapes and dtypes on every worker.
            op: ``"avg_world"``, or ``"avg_custom"`` to divide sums over workers by ``denom``.
            denom: For ``"avg_custom"``, a positive number or a tensor with one element, the same on
                every worker.
            extra: Tensors to average as they are.

        Raises:
            UnknownOperationError: ``op`` is neither. It is a ValueError and a NotImplementedError.
            ValueError: ``denom`` is missing or not positive, or a restored state does not fit a
                tensor.
        """
        divisor = self._divisor(op, denom)
        bytes_before = self.bytes_sent
        b: dict[str, Tensor] = {}
        others: list[Tensor] = []
        for name, tensor in tensors.items():
            if is_matrix(tensor):
                # B_i = M_i + g_i, in the memory of the momentum M_i.
                b[name] = recall(self._memory, name, tensor).add_(tensor).view(len(tensor), -1)
            else:
                others.append(tensor)
        # The columns of P, Q and R are kept as rows, because a row is contiguous in memory. Their
        # scale does not matter, so P may be divided like the other tensors.
        p = {name: self._query(name, b_n) @ b_n.t() for name, b_n in b.items()}
        self._average_uncompressed([*others, *extra, *p.values()], divisor)
        p = {name: orthonormal_rows(p_n) for name, p_n in p.items()}
        r = {name: p[name] @ b_n for name, b_n in b.items()}
        # R is always averaged: M_i takes a part of it, whatever the divisor is.
        self._average_uncompressed(r.values(), self.world_size)
        for name, b_n in b.items():
            length = torch.linalg.vector_norm(r[name], dim=1, keepdim=True)
            # A direction that the momentum does not have takes no part in this update. Its length
            # is 0 or, depending on the processor, that of rounding errors.
            noise = 16 * torch.finfo(length.dtype).eps * length.amax()
            noise.nan_to_num_(nan=0, posinf=0)  # an overflow must stay visible
            q = torch.where(length <= noise, 0, r[name] / length)
            tensors[name].copy_((p[name].t() @ q).view(tensors[name].shape))
            # M_i = B_i - (1 - mu) P R^T
            b_n.addmm_(p[name].t(), flush_tiny_(r[name]), alpha=self.momentum - 1)
            # Without this, an overflow would stay in the momentum and in every later message.
            b_n.nan_to_num_(nan=0, posinf=0, neginf=0)
            # Without such a length, or with an infinite one, a direction keeps its last query.
            is_usable = (length > noise) & length.isfinite()
            self._queries[name] = torch.where(is_usable, q, self._queries[name])
        self._count_compression(tensors.values(), extra, bytes_before)

    def _query(self, name: str, matrix: Tensor) -> Tensor:
        r"""Return the rows of :math:`Q^\top`, random at first, the same on all workers."""
        shape = (min(*matrix.shape, self.rank), matrix.shape[1])
        query = self._queries.get(name)
        if query is None:
            # By name, so that the order of parameters and the user's generators do not matter.
            seed = int(np.random.SeedSequence((self._seed, *name.encode())).generate_state(1)[0])
            generator = torch.Generator().manual_seed(seed)
            query = torch.randn(shape, generator=generator, dtype=matrix.dtype)
            query /= torch.linalg.vector_norm(query, dim=1, keepdim=True)
        elif query.shape != shape:
            raise ValueError(
                f"queries[{name!r}] of the state must have shape {shape}, not "
                f"{tuple(query.shape)}: build the model "
                "and the aggregation as they were when the checkpoint was written"
            )
        self._queries[name] = query = query.to(matrix)
        return query

    def _remembered_by_name(self) -> list[dict[str, Any]]:
        """Return the momenta and the queries."""
        return [self._memory, self._queries]

    def state_dict(self) -> dict[str, Any]:
        r"""Return the state by parameter name; an empty dictionary before the first step.

        The keys are ``"momentum"`` and ``"queries"``, the rows of :math:`Q^\top`.
        """
        if not self._queries:
            return {}
        return {"momentum": dict(self._memory), "queries": dict(self._queries)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`; an empty state starts from zero.

        Raises:
            ValueError: The state is that of another aggregation.
        """
        if state_dict:
            check_keys(self, state_dict, self._named_state)
        self._memory = copies_by_plain_name(state_dict.get("momentum", {}))
        self._queries = copies_by_plain_name(state_dict.get("queries", {}))


def is_matrix(tensor: Tensor) -> bool:
    """Return True if a tensor has several dimensions and real floating-point numbers."""
    return tensor.dim() > 1 and tensor.numel() > 0 and tensor.is_floating_point()
