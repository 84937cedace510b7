r"""Implementation of :mod:`~mlbench_core.ops.pytorch.attention` in plain PyTorch, step by step.

A sentence has queries Q, keys K and values V. :math:`M_{ij}` is 1 if dropout keeps a weight and 0 otherwise:

.. math::
    S = s Q K^T, \quad \ell_i = \ln \sum_j e^{S_{ij}}, \quad P_{ij} = e^{S_{ij} - \ell_i}, \quad
    D = \frac{P \odot M}{1 - p}, \quad O = D V

The sums run over the keys that a query sees. With :math:`\bar{X}` the gradient of X:

.. math::
    \bar{D} = \bar{O} V^T, \quad \bar{P} = \frac{\bar{D} \odot M}{1 - p}, \quad
    \bar{S}_{ij} = P_{ij} \left(\bar{P}_{ij} - \sum_k P_{ik} \bar{P}_{ik}\right), \quad
    \bar{Q} = s \bar{S} K, \quad \bar{K} = s \bar{S}^T Q, \quad \bar{V} = D^T \bar{O}

The operators run this code if they do not use the CUDA kernels, and the tests compare the kernels with it. It computes
in float32, or in float64 for float64 tensors, and it pads packed rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mlbench_core.ops.pytorch.philox import attention_dropout_mask, dropout_threshold

__all__ = ["OperatorArguments", "backward_reference", "forward_reference", "output_like"]


class OperatorArguments(NamedTuple):
    """The arguments of both operators between the tensors Q, K, V and the outputs, in the order of the schema.

    A batch has one of two layouts. With b the number of a sentence:

    * padded: Q has the shape (batch, ``max_query``, heads, d), and padding is marked;
    * packed: Q has the shape (rows, heads, d), and sentence b has the rows ``starts[b]`` to ``starts[b + 1] - 1``.

    Attributes:
        query_starts: int32 of shape (batch + 1,) for packed rows, otherwise None.
        key_starts: The same for the keys.
        max_query: Queries of the longest sentence.
        max_key: Keys of the longest sentence.
        query_padding: bool of shape (batch, ``max_query``), True at padding, or None; None for packed rows.
        key_padding: The same for the keys.
        is_causal: If True, query i sees key j if j <= i + keys - queries of the sentence.
        scale: Factor of the scores.
        dropout_p: Probability that a weight becomes 0.
        seed: int64 of shape (1,). It and ``offset`` define the weights that dropout keeps, see
            :func:`~mlbench_core.ops.pytorch.philox.attention_dropout_mask`. None without dropout.
        offset: Number of the layer.
    """

    query_starts: Tensor | None
    key_starts: Tensor | None
    # These fields and scale have the type Any, because a caller's None is in them until the default replaces it.
    max_query: Any
    max_key: Any
    query_padding: Tensor | None
    key_padding: Tensor | None
    is_causal: bool
    scale: Any
    dropout_p: float
    seed: Tensor | None
    offset: int


def forward_reference(query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Compute the operator ``mlbench::short_attention``; ``arguments`` are :class:`OperatorArguments`."""
    given = OperatorArguments(*arguments)
    queries, keys = _describe(query, key, given)
    # Autocast would run the products in half precision, but half-precision kernels need a more precise reference.
    with torch.autocast(query.device.type, enabled=False):
        scores = _scores(queries.take(query), keys.take(key), queries, keys, given)
        logsumexp = scores.logsumexp(dim=-1)
        # A row that sees no key would give exp(-inf - -inf), which is NaN.
        logsumexp = logsumexp.masked_fill(logsumexp == -torch.inf, torch.inf)
        weights = (scores - logsumexp.unsqueeze(-1)).exp()
        attended = _dropped(weights, given) @ keys.take(value)
    output = output_like(query, given.query_starts is not None)
    queries.put(attended, output)
    return output, logsumexp


def backward_reference(
    grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, logsumexp: Tensor, *arguments: Any
) -> None:
    """Compute ``mlbench::short_attention_backward``.

    ``arguments`` are :class:`OperatorArguments` and then the tensors to write: the gradients of Q, K and V.
    """
    *settings, grad_query, grad_key, grad_value = arguments
    given = OperatorArguments(*settings)
    queries, keys = _describe(query, key, given)
    with torch.autocast(query.device.type, enabled=False):
        q, k, v, grad = queries.take(query), keys.take(key), keys.take(value), queries.take(grad_output)
        # The weights are recomputed from logsumexp, as in the kernels: the forward pass stores no matrix of them.
        weights = (_scores(q, k, queries, keys, given) - logsumexp.unsqueeze(-1)).exp()
        grad_value_dense = _dropped(weights, given).transpose(-1, -2) @ grad
        grad_weights = _dropped(grad @ v.transpose(-1, -2), given)
        # The backward pass of the softmax: the sum over k in the formula for the gradient of S.
        delta = (weights * grad_weights).sum(dim=-1, keepdim=True)
        grad_scores = weights * (grad_weights - delta)
        grad_query_dense = given.scale * grad_scores @ k
        grad_key_dense = given.scale * grad_scores.transpose(-1, -2) @ q
    queries.put(grad_query_dense, grad_query)
    keys.put(grad_key_dense, grad_key)
    keys.put(grad_value_dense, grad_value)


def output_like(tensor: Tensor, is_packed: bool = False) -> Tensor:
    """Return an uninitialized dense tensor of the shape, dtype and order of dimensions of another one.

    Args:
        tensor: Shape (batch, positions, ...), or (rows, ...) if packed.
        is_packed: If True, the first dimension is rows.

    Returns:
        A contiguous tensor. If neighboring sentences are closer in the memory of ``tensor`` than neighboring
        positions, it is instead the transpose of a tensor of shape (positions, batch, ...).
    """
    if is_packed or tensor.stride(0) >= tensor.stride(1):
        return tensor.new_empty(tensor.shape)
    batch, positions = tensor.shape[:2]
    return tensor.new_empty((positions, batch, *tensor.shape[2:])).transpose(0, 1)


@dataclass(frozen=True)
class _Sentences:
    """The places of the rows of a batch of sentences in a padded or a packed tensor.

    Attributes:
        hidden: bool of shape (batch, positions), True at padding and beyond the end of a sentence.
        lengths: int64 of shape (batch,): positions, padding included.
        starts: For packed rows, int64 of shape (batch + 1,).
    """

    hidden: Tensor
    lengths: Tensor
    starts: Tensor | None

    @classmethod
    def describe(cls, tensor: Tensor, starts: Tensor | None, positions: int, padding: Tensor | None) -> _Sentences:
        if starts is None:
            batch = tensor.shape[0]
            if padding is None:
                padding = torch.zeros(batch, positions, dtype=torch.bool, device=tensor.device)
            return cls(padding, torch.full((batch,), positions, device=tensor.device), None)
        # Check the values on the CPU only: on other devices the host would have to wait for them.
        if starts.device.type == "cpu":
            _check_starts(starts.tolist(), tensor.shape[0], positions)
        starts = starts.long()
        lengths = starts.diff()
        hidden = torch.arange(positions, device=tensor.device) >= lengths.unsqueeze(-1)
        return cls(hidden, lengths, starts)

    def take(self, tensor: Tensor) -> Tensor:
        """Return (batch, heads, positions, features) in the working dtype, with 0 at padding for any input."""
        if self.starts is not None:
            position = torch.arange(self.hidden.shape[1], device=tensor.device)
            # Hidden positions read row 0, which always exists, and become 0 below.
            tensor = tensor[(self.starts[:-1, None] + position).masked_fill(self.hidden, 0)]
        dense = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        return dense.masked_fill(self.hidden[:, :, None, None], 0.0).transpose(1, 2)

    def put(self, dense: Tensor, target: Tensor) -> None:
        """Write to the places that :meth:`take` reads, with zeros at padding."""
        dense = dense.transpose(1, 2)
        if self.starts is None:
            target.copy_(dense.masked_fill(self.hidden[:, :, None, None], 0.0))
            return
        row = torch.arange(target.shape[0], device=target.device)
        # The clamps matter only for wrong starts on a device, which nothing has checked.
        sentence = torch.searchsorted(self.starts[1:], row, right=True).clamp_(max=dense.shape[0] - 1)
        target.copy_(dense[sentence, (row - self.starts[sentence]).clamp_(max=dense.shape[1] - 1)])


def _check_starts(starts: list[int], rows: int, positions: int) -> None:
    """Reject starts that do not describe a packed batch of this number of rows, each sentence within ``positions``."""
    lengths = [end - start for start, end in pairwise(starts)]
    if starts[0] != 0 or starts[-1] != rows or not all(0 <= length <= positions for length in lengths):
        raise ValueError(
            f"starts must begin with 0, end with the number of rows ({rows}) and rise by 0 to {positions}, the given "
            f"length of the longest sentence, not be {starts}"
        )


def _describe(query: Tensor, key: Tensor, given: OperatorArguments) -> tuple[_Sentences, _Sentences]:
    """Return the places of the queries and of the keys."""
    queries = _Sentences.describe(query, given.query_starts, given.max_query, given.query_padding)
    return queries, _Sentences.describe(key, given.key_starts, given.max_key, given.key_padding)


def _scores(q: Tensor, k: Tensor, queries: _Sentences, keys: _Sentences, given: OperatorArguments) -> Tensor:
    """Return S of shape (batch, heads, queries, keys), minus infinity if a query does not see a key."""
    hidden = queries.hidden[:, None, :, None] | keys.hidden[:, None, None, :]
    if given.is_causal:
        i, j = (torch.arange(x.shape[2], device=x.device) for x in (q, k))
        # The last query and the last key of a sentence are at the same position.
        last_key = i + (keys.lengths - queries.lengths).unsqueeze(-1)
        hidden = hidden | (j > last_key[:, None, :, None])
    return (given.scale * q @ k.transpose(-1, -2)).masked_fill(hidden, -torch.inf)


def _dropped(weights: Tensor, given: OperatorArguments) -> Tensor:
    """Return the weights after dropout; the same seed and offset keep the same weights."""
    threshold = dropout_threshold(given.dropout_p)
    if threshold == 0:
        return weights
    if given.seed is None:
        raise ValueError(f"seed must be a tensor with dropout_p {given.dropout_p}, not None")
    batch, heads, queries, keys = weights.shape
    kept = attention_dropout_mask(given.seed, given.offset, (batch, heads, queries, keys), threshold)
    # The realized rate is threshold / 65536, so this factor and not 1 / (1 - p) keeps the expectation.
    return torch.where(kept, weights * (65536 / (65536 - threshold)), 0.0)
