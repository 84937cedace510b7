"""Average gradients as products of two thin matrices, with error feedback (PowerSGD, ACP-SGD)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mlbench_core.aggregation.pytorch.aggregation import Denominator
from mlbench_core.aggregation.pytorch.all_reduce import AVG_WORLD, AllReduceAggregation
from mlbench_core.aggregation.pytorch.compression.compressed import (
    LossyAggregation,
    flush_tiny_,
    orthonormal_rows,
    recall,
)
from mlbench_core.aggregation.pytorch.transport.messages import BLOCK_ELEMENTS
from mlbench_core.aggregation.pytorch.transport.names import (
    by_plain_name,
    check_keys,
    check_names,
    copies_by_plain_name,
)
from mlbench_core.arguments import check_int

__all__ = ["PowerAggregation"]

COMM_DTYPES = (None, torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Names that an optimizer gives to parameters outside the model.
_OUTSIDE_MODEL = re.compile(r"group\d+\.\d+")


class PowerAggregation(LossyAggregation):
    r"""Average gradients over all workers by a low-rank approximation (PowerSGD).

    One step of power iteration computes it.

    A gradient :math:`g_i` of worker :math:`i` of :math:`k` is viewed as a matrix with :math:`n`
    rows (its first dimension) and :math:`m` columns (all others). It is sent as two factors of rank
    :math:`r = \min(n, m, \text{rank})`. With the error memory :math:`e_i` and a matrix :math:`Q \in
    \mathbb{R}^{m \times r}`, the same on all workers,

    .. math::
        \Delta_i &= g_i + e_i \\
        P &= \operatorname{orthonormal}\Bigl(\frac{1}{k} \sum_i \Delta_i Q\Bigr) \\
        Q &= \frac{1}{k} \sum_i \Delta_i^\top P \\
        g_i &\leftarrow P Q^\top \\
        e_i &\leftarrow \Delta_i - P Q^\top.

    Up to rounding, nothing is lost: :math:`\frac{1}{k} \sum_i \Delta_i = P Q^\top + \frac{1}{k}
    \sum_i e_i` after every step. If the average of the :math:`\Delta_i` has rank :math:`r` or less,
    :math:`P Q^\top` is that average.

    A tensor is compressed if that makes it smaller, :math:`r (n + m) < n m`. All others (vectors,
    numbers, small matrices) are averaged as they are. A call sends two messages for any number of
    tensors: all :math:`P` together with the uncompressed tensors, then all :math:`Q`. Each is split
    if tensors differ in dtype or device.

    With ``alternate=True`` (ACP-SGD) a call sends one message. Steps take turns, counted for each
    matrix from 0. An even step starts from the last :math:`Q` and sends :math:`P_i`:

    .. math::
        Q &\leftarrow \operatorname{orthonormal}(Q) \\
        P_i &= \Delta_i Q \\
        e_i &\leftarrow \Delta_i - P_i Q^\top \\
        P &= \frac{1}{k} \sum_i P_i \\
        g_i &\leftarrow P Q^\top.

    An odd step does the same with the roles exchanged: it makes the last :math:`P` orthonormal and
    sends :math:`Q_i = \Delta_i^\top P`. The error is that of the worker's own factor, and
    :math:`\frac{1}{k} \sum_i \Delta_i = P Q^\top + \frac{1}{k} \sum_i e_i` holds as above. If the
    average of the gradients is constant and has rank :math:`r` or less, the average of the
    :math:`e_i` is 0 after every odd step.

    The factors are computed at least in float32, also for models in half precision. In each call, a
    worker sends the bytes of the uncompressed tensors plus :math:`r (n + m)` numbers of
    ``comm_dtype`` per matrix. With ``alternate=True`` these are :math:`r n` in even and :math:`r m`
    in odd steps. If a ``comm_dtype`` rounds the sum over workers, this rounding is then lost.

    If ``denom`` changes from step to step, the error of one step is divided by the denominator of a
    later step. Then only the sum of all :math:`g_i + e_i` has a meaning, not their average.

    If a gradient is infinite or nan on one worker, the result is nan on all workers, so every
    worker sees the overflow. The error memory of that matrix starts again from zero.

    Attributes:
        model: As given.
        rank: As given.
        compression_ratio: Bytes of the gradients over bytes sent for them so far; 1 before anything
            was sent.

    Args:
        model: The model whose gradients will be aggregated.
        use_cuda: See :class:`~mlbench_core.aggregation.pytorch.aggregation.Aggregation`.
        reuse_query: True to start from the :math:`Q` of the last step (the paper's warm start).
            With False, every step draws a new one from a normal distribution. ``alternate=True``
            always starts from the last factor, and sets it to True.
        world_size: Number of workers; None takes that of the process group.
        rank: Largest rank of the approximation, 1 or more. It is not the worker's number.
        error_feedback: True to keep :math:`e_i`. With False, the error of the compression is lost.
        comm_dtype: Type in which :math:`P` and :math:`Q` are sent, for example ``torch.bfloat16``.
            None is the type in which they are computed: float32, or float64 for gradients in
            float64.
        start_after_steps: Number of first steps in which every tensor is averaged uncompressed.
        seed: Seed of the random generator of this object; the same on all workers.
        alternate: True to send only one factor in each step, :math:`P` and :math:`Q` in turns
            (ACP-SGD).
        process_group: See
            :class:`~mlbench_core.aggregation.pytorch.all_reduce.AllReduceAggregation`.

    Raises:
        ValueError: An argument is out of range, or ``world_size`` is not that of the process group.
        TypeError: An argument has the wrong type.

    Example:
        >>> model = nn.Linear(6, 8, bias=False)
        >>> model.weight.grad = torch.outer(torch.arange(8.0), torch.ones(6))  # has rank 1
        >>> before = model.weight.grad.clone()
        >>> PowerAggregation(model, rank=1).agg_grad()(model, AVG_WORLD)
        >>> torch.allclose(model.weight.grad, before, atol=1e-5)
        True

    References:
        Vogels, Karimireddy and Jaggi: PowerSGD: Practical Low-Rank Gradient Compression for
        Distributed Optimization. arXiv:1905.13727

        Zhang, Zhang, Shi, Chu and Li: Evaluation and Optimization of Gradient Compression for
        Distributed Deep Learning (ACP-SGD). arXiv:2306.08881
    """

    _named_state = ("errors", "queries", "bases", "uncompressed_steps")
    # Warm starts and the generator determine Q, which must be the same on all
    # workers. Only the errors differ.
    _own_state = ("errors",)

    def __init__(
        self,
        model: nn.Module,
        use_cuda: bool = False,
        reuse_query: bool = False,
        world_size: int | None = 1,
        rank: int = 1,
        *,
        error_feedback: bool = True,
        comm_dtype: torch.dtype | None = None,
        start_after_steps: int = 0,
        seed: int = 0,
        alternate: bool = False,
        process_group: Any = None,
    ) -> None:
        if model is None:
            raise ValueError("model is missing: give model=, the torch.nn.Module to train")
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
        if comm_dtype not in COMM_DTYPES:
            raise ValueError(
                f"comm_dtype must be one of {', '.join(map(str, COMM_DTYPES))}, not {comm_dtype!r}"
            )
        # In half precision the sum over many workers may overflow, but their average does not.
        divides_before = comm_dtype is not None
        uncompressed = AllReduceAggregation(
            world_size, divide_before=divides_before, use_cuda=use_cuda, process_group=process_group
        )
        super().__init__(uncompressed, use_cuda)
        self.model = model
        self.rank = check_int("rank", rank)
        self.alternate = alternate
        self.reuse_query = reuse_query or alternate
        self.error_feedback = error_feedback
        self.comm_dtype = comm_dtype
        self.start_after_steps = check_int("start_after_steps", start_after_steps, least=0)
        self._generator = torch.Generator().manual_seed(check_int("seed", seed, least=0))
        # With alternate, the factor of the last step: P after even steps, Q after odd steps.
        self._queries: dict[str, Tensor] = {}
        self._bases: dict[str, Tensor] = {}
        self._uncompressed_steps: dict[str, int] = {}

    def aggregate(
        self,
        tensors: Mapping[str, Tensor],
        op: str,
        denom: Denominator | None = None,
        extra: Sequence[Tensor] = (),
    ) -> None:
        """Replace every tensor by the approximate average over workers, in place.

        Args:
            tensors: By name, in the same order with the same shapes and dtypes on every worker.
            op: ``"avg_world"``, or ``"avg_custom"`` to divide the sum over workers by ``denom``
                instead of by k.
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
        matrices = []
        for name, tensor in tensors.items():
            if self._compresses(name, tensor):
                matrices.append(self._matrix(name, tensor))
        if self.alternate:
            self._send_one_factor(matrices, tensors, extra, divisor)
        else:
            # Q is averaged over the workers, also for "avg_custom", so P Q^T needs another factor.
            scale: Denominator | None = None
            if op != AVG_WORLD:
                wide = divisor
                if isinstance(divisor, Tensor):
                    # A divisor in half precision would round the scale, so it becomes float64.
                    wide = divisor.double()
                scale = self.world_size / wide
            self._send_both_factors(matrices, tensors, extra, divisor, scale)
        self._count_compression(tensors.values(), extra, bytes_before)

    def _send_both_factors(
        self,
        matrices: Sequence[_Matrix],
        tensors: Mapping[str, Tensor],
        extra: Sequence[Tensor],
        divisor: Denominator,
        scale: Denominator | None,
    ) -> None:
        """Take a step of PowerSGD, in two messages."""
        # P is made orthonormal, so its scale does not matter. It is sent with the uncompressed
        # tensors, in the place of its own tensor, and may be divided like them.
        left = {}
        for matrix in matrices:
            query = self._start(matrix, "queries")
            left[matrix.name] = self._to_send(matrix.accumulate(query))
        self._average_uncompressed([*{**tensors, **left}.values(), *extra], divisor)

        bases = [orthonormal_rows(left[matrix.name].to(matrix.delta.dtype)) for matrix in matrices]
        right = {}
        for matrix, p in zip(matrices, bases, strict=True):
            right[matrix.name] = self._to_send(matrix.project(p))
        # Q is always averaged. For "avg_custom", the product P Q^T is multiplied by the scale once.
        self._average_uncompressed(right.values(), self.world_size)

        factors = [flush_tiny_(right[matrix.name].to(matrix.delta.dtype)) for matrix in matrices]
        # Every worker computes the same P Q^T, because it has the same averages as the others.
        for matrix, p, q in zip(matrices, bases, factors, strict=True):
            matrix.replace(p, q, scale)
            if self.reuse_query:
                self._queries[matrix.name] = q

    def _send_one_factor(
        self,
        matrices: Sequence[_Matrix],
        tensors: Mapping[str, Tensor],
        extra: Sequence[Tensor],
        divisor: Denominator,
    ) -> None:
        """Take a step of ACP-SGD, in one message."""
        fixed, sent = {}, {}
        for matrix in matrices:
            name = matrix.name
            # P is kept only from an even step to the next odd one, so its presence shows which of
            # the two this step is. Each matrix counts its own steps: a layer that is unfrozen later
            # begins with its even step.
            is_odd = name in self._bases
            if is_odd:
                start = self._start(matrix, "bases")
            else:
                start = self._start(matrix, "queries")
            # Directions that were drawn again are not yet orthogonal to the others.
            fixed[name] = orthonormal_rows(start)
            own = flush_tiny_(matrix.factor(fixed[name], is_odd))
            sent[name] = self._to_send(own)
            # The average replaces the worker's own factor. With a comm_dtype, the error includes
            # the rounding of that factor.
            rounded = sent[name].to(own.dtype)
            if is_odd:
                matrix.subtract(fixed[name], rounded)
            else:
                matrix.subtract(rounded, fixed[name])
        self._average_uncompressed([*{**tensors, **sent}.values(), *extra], divisor)

        for matrix in matrices:
            name = matrix.name
            average = flush_tiny_(sent[name].to(matrix.delta.dtype))
            # A matrix keeps one factor, the average of this step. The next step starts from it, and
            # computes the other one.
            if self._bases.pop(name, None) is None:
                matrix.replace(average, fixed[name], keeps_error=True)
                self._bases[name] = average
                self._queries.pop(name, None)
            else:
                matrix.replace(fixed[name], average, keeps_error=True)
                self._queries[name] = average

    def state_dict(self) -> dict[str, Any]:
        r"""Return the values kept between steps.

        Returns:
            By parameter name, ``"errors"`` (shape (n, m)), ``"queries"`` (the rows of the last
            :math:`Q^\top`, shape (r, m)) and ``"uncompressed_steps"``; and ``"generator"``, the
            state of the random generator. With ``alternate=True`` also ``"bases"`` (the rows of the
            last :math:`P^\top`, shape (r, n)): a matrix is there after its even steps, and among
            the queries after its odd steps.
        """
        state: dict[str, Any] = {"errors": dict(self._memory), "queries": dict(self._queries)}
        if self.alternate:
            state["bases"] = dict(self._bases)
        state["uncompressed_steps"] = dict(self._uncompressed_steps)
        state["generator"] = self._generator.get_state()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`; an empty dictionary leaves everything as it is.

        Raises:
            ValueError: ``state_dict`` belongs to another aggregation, another model, or another
                rank of the approximation.
        """
        if not state_dict:
            return
        # A run may go on with alternate=True from a state without it, but not the reverse.
        keys = ("errors", "queries", "uncompressed_steps", "generator")
        optional: tuple[str, ...] = ()
        if self.alternate:
            optional = ("bases",)
        check_keys(self, state_dict, keys, optional)
        parameters = by_plain_name(dict(self.model.named_parameters(remove_duplicate=False)))
        errors = copies_by_plain_name(state_dict["errors"])
        queries = copies_by_plain_name(state_dict["queries"])
        bases = copies_by_plain_name(state_dict.get("bases", {}))
        # An optimizer's parameters outside the model have names such as group0.1, which only the
        # optimizer can check.
        names = self.remembered_names(state_dict)
        outside = set(filter(_OUTSIDE_MODEL.fullmatch, names))
        check_names(names - outside, parameters)
        for kind, tensors in (("errors", errors), ("queries", queries), ("bases", bases)):
            for name in tensors.keys() & parameters.keys():
                self._check_shape(kind, name, tensors[name], parameters[name])
        self._memory, self._queries, self._bases = errors, queries, bases
        self._uncompressed_steps = by_plain_name(state_dict["uncompressed_steps"])
        self._generator.set_state(state_dict["generator"].cpu())

    def _remembered_by_name(self) -> list[dict[str, Any]]:
        """Return error memories, warm starts and counts of uncompressed steps."""
        return [self._memory, self._queries, self._bases, self._uncompressed_steps]

    def _compresses(self, name: str, tensor: Tensor) -> bool:
        """Return True if a tensor is compressed now; count its first, uncompressed steps."""
        if not tensor.is_floating_point() or tensor.dim() < 2 or tensor.numel() == 0:
            return False
        rows, columns = len(tensor), tensor.numel() // len(tensor)
        # The factors would be at least as large as the matrix, which is exact without them.
        if min(rows, columns, self.rank) * (rows + columns) >= rows * columns:
            return False
        steps = self._uncompressed_steps.get(name, 0)
        if steps < self.start_after_steps:
            self._uncompressed_steps[name] = steps + 1
            return False
        return True

    def _matrix(self, name: str, tensor: Tensor) -> _Matrix:
        """View a tensor as a matrix, with its error memory (zeros at first)."""
        gradient = tensor.contiguous().view(len(tensor), -1)
        if self.error_feedback:
            delta = recall(self._memory, name, gradient)
        else:
            delta = gradient.to(torch.promote_types(tensor.dtype, torch.float32))
        return _Matrix(name, tensor, gradient, delta, has_memory=self.error_feedback)

    def _start(self, matrix: _Matrix, kind: Literal["queries", "bases"]) -> Tensor:
        r"""Return the rows of :math:`Q^\top` (:math:`P^\top` for bases) to start from.

        They are the same on all workers.

        Rows that became zero or nan are drawn again. A warm start would otherwise lose these
        directions permanently. Every step uses the generator, even if the draw is not needed, so
        that its state stays the same on all workers.
        """
        shape = self._shape(kind, matrix.tensor)
        # Divided by sqrt(m), a row of Q^T has a length of about 1. So an entry of P is at most
        # about as large as the norm of a row of the gradient.
        drawn = torch.randn(shape, generator=self._generator, dtype=matrix.delta.dtype)
        drawn = (drawn / math.sqrt(shape[1])).to(matrix.delta.device)
        factors = self._queries
        if kind == "bases":
            factors = self._bases
        if not self.reuse_query or matrix.name not in factors:
            return drawn
        remembered = factors[matrix.name]
        self._check_shape(kind, matrix.name, remembered, matrix.tensor)
        basis = orthonormal_rows(remembered.to(drawn))
        # A row is now a unit vector, zero or nan. The comparison is true only for a unit vector.
        return torch.where(basis.square().sum(dim=1, keepdim=True) > 0.5, basis, drawn)

    def _to_send(self, factor: Tensor) -> Tensor:
        if self.comm_dtype is None:
            return factor
        return factor.to(self.comm_dtype)

    def _shape(self, kind: str, tensor: Tensor) -> tuple[int, int]:
        """Return the shape of a tensor's error memory (``"errors"``), query or basis."""
        rows, columns = len(tensor), tensor.numel() // len(tensor)
        if kind == "errors":
            return rows, columns
        rank = min(rows, columns, self.rank)
        if kind == "bases":
            return rank, rows
        return rank, columns

    def _check_shape(self, kind: str, name: str, remembered: Tensor, tensor: Tensor) -> None:
        """Raise an error for a restored tensor of another model or rank."""
        shape = self._shape(kind, tensor)
        if remembered.shape != shape:
            raise ValueError(
                f"{kind}[{name!r}] of the state must have shape {shape} for "
                f"rank {self.rank} and a gradient of shape {tuple(tensor.shape)}, not "
                f"{tuple(remembered.shape)}: build the model and the aggregation as "
                "they were when the checkpoint was written"
            )


@dataclass
class _Matrix:
    r"""A gradient as a matrix, with its error memory.

    The factors are kept transposed, P as (r, n) and Q as (r, m), because products with matrices of
    few columns are several times slower than with matrices of few rows.

    Attributes:
        name: The tensor's name.
        tensor: The tensor, of any shape and strides.
        gradient: The tensor as a matrix, shape (n, m): a view of ``tensor`` if that is contiguous,
            else a copy.
        delta: :math:`\Delta`, shape (n, m), at least float32. Before :meth:`accumulate` and after
            :meth:`replace` it holds the error memory. Without an error memory it is the gradient.
        has_memory: True if there is an error memory.
    """

    name: str
    tensor: Tensor
    gradient: Tensor
    delta: Tensor
    has_memory: bool

    def accumulate(self, query: Tensor) -> Tensor:
        r"""Compute :math:`\Delta = g + e` in place of :math:`e`; return :math:`(\Delta Q)^\top`."""
        # Without an error memory, delta is the gradient itself, and there is nothing to add.
        if not self.has_memory:
            return query @ self.delta.t()
        left = query.new_empty(len(query), len(self.delta))
        for gradient, delta, part in self._blocks(left):
            delta += gradient
            torch.mm(query, delta.t(), out=part)
        return left

    def project(self, left: Tensor) -> Tensor:
        r"""Return :math:`P^\top \Delta`, shape (r, m), for the rows of :math:`P^\top`."""
        right = left.new_zeros(len(left), self.delta.shape[1])
        # Each block adds to all of the result, which must stay in the cache as well.
        if right.numel() > BLOCK_ELEMENTS:
            return left @ self.delta
        # MKL takes up to twice as long for a whole matrix that is not in the cache.
        for _, delta, part in self._blocks(left):
            right.addmm_(part, delta)
        return right

    def factor(self, fixed: Tensor, is_left: bool) -> Tensor:
        r"""Compute :math:`\Delta = g + e` and return the factor that belongs to a fixed one.

        It is :math:`(\Delta Q)^\top`, shape (r, n), or for a fixed :math:`P` the rows of
        :math:`P^\top \Delta`, shape (r, m).
        """
        if not is_left:
            return self.accumulate(fixed)
        if self.has_memory:
            self.delta += self.gradient
        return self.project(fixed)

    def subtract(self, left: Tensor, right: Tensor) -> None:
        r"""Subtract :math:`P Q^\top` from :math:`\Delta`, which becomes the error."""
        if self.has_memory:
            for _, delta, part in self._blocks(left):
                delta.addmm_(part.t(), right, alpha=-1)

    def replace(
        self,
        left: Tensor,
        right: Tensor,
        scale: Denominator | None = None,
        *,
        keeps_error: bool = False,
    ) -> None:
        r"""Compute :math:`g = P Q^\top` and the error :math:`e = \Delta - P Q^\top`.

        :math:`g` takes the place of the gradient, and :math:`e` that of :math:`\Delta`.

        ``scale`` multiplies :math:`g` alone. With ``keeps_error``, ``delta`` has the error already.
        """
        for gradient, delta, part in self._blocks(left):
            # The error is the difference to the product before it is rounded to half precision.
            product = gradient
            if gradient.dtype != delta.dtype:
                product = torch.empty_like(delta)
            _multiply(part, right, out=product)
            if product is not gradient:
                gradient.copy_(product)
            if self.has_memory and not keeps_error:
                delta -= product
        if self.has_memory:
            is_finite = left.isfinite().all() & right.isfinite().all()
            # On a GPU reading the flag would make the host wait, so there masked_fill_ always runs.
            if right.is_cuda or not is_finite:
                self.delta.masked_fill_(~is_finite, 0)
        if isinstance(scale, Tensor):
            scale = scale.to(right.device)
        if scale is not None:
            self.gradient.mul_(scale)
        if self.gradient.data_ptr() != self.tensor.data_ptr():
            self.tensor.copy_(self.gradient.view(self.tensor.shape))

    def _blocks(self, left: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Split gradient and delta into blocks of rows, and ``left`` into their columns."""
        rows, columns = self.delta.shape
        # On a CPU a block stays in the cache between the operations. A GPU gets whole
        # matrices, in fewer launches.
        if self.delta.device.type == "cpu":
            rows = max(1, BLOCK_ELEMENTS // columns)
        return zip(
            self.gradient.split(rows), self.delta.split(rows), left.split(rows, dim=1), strict=True
        )


def _multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Write ``left`` transposed, of shape (r, n), times ``right``, shape (r, m), into ``out``."""
    # A product of a column and a row is fast on every CPU, and has the same bits for any number of
    # threads. On an AMD EPYC, the sum of two or four of them takes less than half as long as MKL's
    # product of matrices (2048 rows and columns).
    if len(left) > 4 or out.device.type != "cpu":
        torch.mm(left.t(), right, out=out)
        return
    (column, row), *others = zip(left.t().split(1, dim=1), right.split(1), strict=True)
    torch.mm(column, row, out=out)
    for column, row in others:
        out.addmm_(column, row)
