"""Batches of sentences for `attention.py`: their three layouts, exact results on them, and the
least cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mlbench_core.models.pytorch.transformer.modules.attention import (
    attention_mask,
    reference_attention,
)

HEADS, HEAD_DIM = 16, 64
WIDTH = HEADS * HEAD_DIM
Layout = Literal["batch first", "time first", "packed"]
"""(sentences, positions, ...), (positions, sentences, ...), or (tokens, ...) without padding."""


@dataclass(frozen=True)
class Batch:
    """Sentences of a batch, padded on the right.

    Attributes:
        length: Positions of the padded layouts.
        lengths: Tokens of each sentence, int64 of shape (sentences,).
        shortest: The least of them.
        padding: bool of shape (sentences, length), True at padding; None if all sentences have the
            same length.
        starts: First row of each sentence in the packed layout, and the number of rows; int32,
            shape (sentences + 1,).
        rows: Indices of the tokens among the sentences x length positions, int64 of shape
            (tokens,).
    """

    length: int
    lengths: Tensor
    shortest: int
    padding: Tensor | None
    starts: Tensor
    rows: Tensor

    @property
    def sentences(self) -> int:
        """Return the number of sentences."""
        return len(self.lengths)

    @property
    def real(self) -> Tensor:
        """Return a mask of shape (sentences, length), True at tokens."""
        return torch.arange(self.length, device=self.lengths.device) < self.lengths.unsqueeze(1)

    def put(self, x: Tensor, layout: Layout) -> Tensor:
        """Convert a tensor of shape (sentences, length, ...) to another layout, contiguous."""
        if layout == "time first":
            return x.transpose(0, 1).contiguous()
        return x.flatten(0, 1)[self.rows] if layout == "packed" else x.contiguous()

    def take(self, x: Tensor, layout: Layout) -> Tensor:
        """Invert :meth:`put`, with zeros at padding."""
        if layout == "packed":
            padded = x.new_zeros(self.sentences * self.length, *x.shape[1:]).index_copy(
                0, self.rows, x
            )
            return padded.unflatten(0, (self.sentences, self.length))
        padded = x.transpose(0, 1) if layout == "time first" else x
        return padded.masked_fill(~self.real.view(*self.real.shape, *[1] * (padded.dim() - 2)), 0)


def make_batch(length: int, tokens: int, padded: bool, device: torch.device, seed: int) -> Batch:
    """Make sentences of ``length`` positions, ``tokens`` in total; if padded, half to all of them
    are tokens."""
    sentences = max(1, tokens // length)
    lengths = torch.full((sentences,), length)
    if padded:
        generator = torch.Generator().manual_seed(seed)
        lengths[1:] = torch.randint(
            -(-length // 2), length + 1, (sentences - 1,), generator=generator
        )
    real = torch.arange(length) < lengths.unsqueeze(1)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).to(torch.int32)
    rows = real.flatten().nonzero().squeeze(1)
    padding = (~real).to(device) if padded else None
    shortest = int(lengths.min())
    return Batch(length, lengths.to(device), shortest, padding, starts.to(device), rows.to(device))


@dataclass(frozen=True)
class Cost:
    """The least work of one call.

    Attributes:
        bytes: Read and written, every tensor once, tokens only.
        flops: Multiplications and additions of the matrix products, tokens only.
    """

    bytes: int
    flops: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bytes + other.bytes, self.flops + other.flops)


def core_cost(lengths: list[int], backward: bool) -> Cost:
    """Return the least cost of the core.

    The forward pass reads Q, K, V and writes O and the log-sum-exp; it has two products of 2 d
    FLOPs for each pair of positions. The backward pass reads Q, K, V, dO and the log-sum-exp, and
    writes dQ, dK and dV; it has five products."""
    tensor, statistics = 2 * WIDTH * sum(lengths), 4 * HEADS * sum(lengths)
    product = 2 * WIDTH * sum(length * length for length in lengths)
    forward = Cost(4 * tensor + statistics, 2 * product)
    return forward + Cost(7 * tensor + statistics, 5 * product) if backward else forward


def module_cost(lengths: list[int], backward: bool) -> Cost:
    """Return the least cost of the core with both projections.

    In the forward pass a projection reads its input and weights, and writes its output. In the
    backward pass it reads the output's gradient, the input and the weights, and writes the
    gradients of the latter two, with two products."""
    tokens, cost = sum(lengths), core_cost(lengths, backward)
    for columns in (3 * WIDTH, WIDTH):
        inputs, outputs, weights = 2 * tokens * WIDTH, 2 * tokens * columns, 2 * WIDTH * columns
        product = 2 * tokens * WIDTH * columns
        cost += Cost(inputs + outputs + weights, product)
        if backward:
            cost += Cost(2 * inputs + outputs + 2 * weights, 2 * product)
    return cost


def random_leaves(part: str, batch: Batch, dtype: torch.dtype, seed: int) -> tuple[Tensor, ...]:
    """Make random operands, batch first: Q, K, V of the core; input and both weights of the
    module."""
    device = batch.lengths.device
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, generator=generator, device=device)).to(dtype)

    if part == "core":
        q, k, v = (draw(batch.sentences, batch.length, HEADS, HEAD_DIM) for _ in range(3))
        return q, k, v
    scale = WIDTH**-0.5
    x = draw(batch.sentences, batch.length, WIDTH)
    return x, draw(3 * WIDTH, WIDTH, scale=scale), draw(WIDTH, WIDTH, scale=scale)


def random_gradient(part: str, batch: Batch, dtype: torch.dtype, seed: int) -> Tensor:
    """Make a gradient of the output, batch first, with zeros at padding."""
    shape = (HEADS, HEAD_DIM) if part == "core" else (WIDTH,)
    generator = torch.Generator(device=batch.lengths.device).manual_seed(seed + 1)
    gradient = torch.randn(
        batch.sentences, batch.length, *shape, generator=generator, device=batch.lengths.device
    )
    return batch.take(gradient.to(dtype), "batch first")


def exact(part: str, batch: Batch, leaves: tuple[Tensor, ...], gradient: Tensor) -> list[Tensor]:
    """Compute output and gradients in float64 without dropout, batch first, with zeros at
    padding."""
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    if part == "core":
        q, k, v = wide
    else:
        x, in_weight, out_weight = wide
        q, k, v = (x @ in_weight.T).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)
    mask = attention_mask(
        batch.length, batch.length, batch.padding, is_causal=False, device=q.device
    )
    output = reference_attention(*(h.transpose(1, 2) for h in (q, k, v)), mask)[0].transpose(1, 2)
    if part != "core":
        output = output.flatten(2) @ out_weight.T
    gradients = torch.autograd.grad(output, wide, gradient.double())
    return [batch.take(output.detach(), "batch first"), *gradients]


def probe_leaves(part: str, batch: Batch, dtype: torch.dtype, first_key: int) -> tuple[Tensor, ...]:
    """Make operands that let the output show the dropped weights.

    Feature c of a head's output is the weight of key ``first_key`` + c, which is never 0 by itself.
    """
    device = batch.lengths.device
    x = torch.zeros(batch.sentences, batch.length, HEADS, HEAD_DIM, dtype=dtype, device=device)
    count = min(HEAD_DIM, batch.length - first_key)
    x[:, first_key : first_key + count] = torch.eye(HEAD_DIM, dtype=dtype, device=device)[
        :count
    ].unsqueeze(1)
    if part == "core":
        return torch.zeros_like(x), torch.zeros_like(x), x
    eye = torch.eye(WIDTH, dtype=dtype, device=device)
    return x.flatten(2), torch.cat((eye, eye, eye)), eye


def dropped(batch: Batch, output: Tensor, first_key: int) -> tuple[int, int]:
    """Count the dropped weights and all weights of the probe in a batch-first output."""
    weights = output.reshape(batch.sentences, batch.length, HEADS, HEAD_DIM)
    keys = batch.real[:, first_key : first_key + HEAD_DIM]
    counted = (batch.real.unsqueeze(2) & keys.unsqueeze(1)).unsqueeze(2)
    zeros = (weights[..., : keys.shape[1]] == 0) & counted
    return int(zeros.sum()), HEADS * int(counted.sum())
