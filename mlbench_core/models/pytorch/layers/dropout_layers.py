r"""Dropout for recurrent networks: locked over time, of whole words, and of weights.

Each multiplies by a mask :math:`m \sim \mathrm{Bernoulli}(1 - p) / (1 - p)`, whose mean is 1. They
differ in the elements that share one random number of the mask.

References:
    Gal and Ghahramani 2016, A Theoretically Grounded Application of Dropout in Recurrent Neural
    Networks, arXiv 1512.05287.

    Merity, Keskar and Socher 2017, Regularizing and Optimizing LSTM Language Models, arXiv
    1708.02182.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from mlbench_core import torch_private

__all__ = ["LockedDropout", "WeightDrop", "check_probability", "embedded_dropout"]


def check_probability(name: str, p: float) -> float:
    """Check a probability and return it.

    Raises:
        ValueError: The probability is outside of 0 to 1.
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{name} must be from 0 to 1, not {p}")
    return p


class LockedDropout(nn.Module):
    r"""Dropout with one mask for all time steps.

    .. math:: y_{tbf} = m_{bf} \, x_{tbf}

    In evaluation mode the input is returned unchanged.

    Args:
        p: Probability of dropping.

    Raises:
        ValueError: ``p`` is outside of 0 to 1.

    Example:
        >>> y = LockedDropout(p=0.5)(torch.ones(7, 2, 3))
        >>> bool((y == y[0]).all())
        True
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = check_probability("p", p)

    def forward(self, x: Tensor) -> Tensor:
        """Drop features, the same at all time steps.

        Args:
            x: Floating point of shape (time, ...); for sequences (time, batch, features).

        Returns:
            The same shape and dtype.
        """
        if not self.training or self.p == 0:
            return x
        # One mask for the first time step, which broadcasts over all others.
        return x * F.dropout(torch.ones_like(x[:1]), self.p)

    def extra_repr(self) -> str:
        """Return the arguments, for ``repr``."""
        return f"p={self.p}"


def embedded_dropout(
    embed: nn.Embedding, words: Tensor, dropout: float = 0.1, scale: Tensor | None = None
) -> Tensor:
    r"""Look up words and drop some of them at all their occurrences.

    .. math:: y_i = m_{w_i} \, s_{w_i} \, E_{w_i}

    The mask has one element for each word of the vocabulary; :math:`E` are the embeddings and
    :math:`s` the scale. Only the rows that are looked up are multiplied, not the whole matrix. The
    function has no evaluation mode: pass ``dropout=0`` to drop nothing.

    Args:
        embed: The embedding. Its ``padding_idx`` and other options apply.
        words: Integer ids of any shape.
        dropout: Probability of dropping a word.
        scale: Factors of the embeddings, of a shape that broadcasts to (vocabulary, 1) or to that
            of the embedding; None for 1.

    Returns:
        The embeddings, of shape (..., dimensions).

    Raises:
        ValueError: ``dropout`` is outside of 0 to 1.

    Example:
        >>> embed, words = nn.Embedding(4, 2), torch.tensor([3, 1])
        >>> bool((embedded_dropout(embed, words, dropout=0) == embed(words)).all())
        True
    """
    check_probability("dropout", dropout)
    embedded = embed(words)
    if dropout > 0:
        # One number for each word of the vocabulary, so that all occurrences of a word share it.
        mask = F.dropout(embed.weight.new_ones(embed.num_embeddings, 1), dropout)
        embedded = embedded * F.embedding(words, mask)
    if scale is not None:
        of_words = torch.atleast_2d(scale)
        embedded = embedded * F.embedding(words, of_words.expand(embed.num_embeddings, -1))
    return embedded


class WeightDrop(nn.Module):
    r"""Dropout of a module's weights, resampled in each forward pass.

    All time steps of a pass have the same weights:

    .. math:: W' = M \odot W, \qquad M_{ij} \sim \mathrm{Bernoulli}(1 - p) / (1 - p)

    On recurrent weights this is the DropConnect of AWD-LSTM. The module computes with :math:`W'`
    instead of its parameter :math:`W`. The parameter does not change and is not copied: optimizers
    and ``state_dict`` see it under the name ``module.<weight>``. In evaluation mode, or with
    ``dropout=0``, the module is called directly. Recurrent modules keep their fused kernels. For
    cuDNN, each pass copies all weights into one buffer, because cuDNN would otherwise do so itself,
    with a warning.

    State dicts of version 3.0, which have the name ``module.<weight>_raw``, can be loaded.

    Args:
        module: The module, for example an :class:`torch.nn.LSTM`.
        weights: Names of its parameters to drop, for example ``["weight_hh_l0"]``.
        dropout: Probability of dropping.

    Raises:
        ValueError: ``dropout`` is outside of 0 to 1, or the module does not have such a parameter.

    Example:
        >>> lstm = WeightDrop(nn.LSTM(3, 4), ["weight_hh_l0"], dropout=0.5)
        >>> output, (h, c) = lstm(torch.zeros(5, 2, 3))
        >>> output.shape
        torch.Size([5, 2, 4])
    """

    def __init__(self, module: nn.Module, weights: Sequence[str], dropout: float = 0) -> None:
        super().__init__()
        named = dict(module.named_parameters())
        if isinstance(weights, str) or not named.keys() >= set(weights):
            choices = ", ".join(named) or "nothing"
            raise ValueError(f"weights must be a list of some of {choices}, not {weights!r}")
        self.module = module
        self.weights = list(weights)
        self.dropout = check_probability("dropout", dropout)
        self.register_load_state_dict_pre_hook(_rename_raw_weights)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, and drop some of its weights in training.

        Args:
            *args: Arguments of the module.
            **kwargs: Keyword arguments of the module.

        Returns:
            The result of the module.
        """
        if not self.training or self.dropout == 0:
            return self.module(*args, **kwargs)
        dropped: dict[str, Tensor] = {}
        for name in self.weights:
            dropped[name] = F.dropout(self.module.get_parameter(name), self.dropout)
        # Recurrent modules read their own list of weights, which functional_call does not replace
        # cheaply.
        if not isinstance(self.module, nn.RNNBase):
            return torch.func.functional_call(self.module, dropped, args, kwargs)
        with _computing_with(self.module, dropped):
            return self.module(*args, **kwargs)

    def extra_repr(self) -> str:
        """Return the arguments, for ``repr``."""
        return f"weights={self.weights}, dropout={self.dropout}"


def _rename_raw_weights(
    module: WeightDrop, state_dict: dict[str, Any], prefix: str, *others: Any
) -> None:
    """Rename the weights of a state of version 3.0 to the names used here."""
    for name in module.weights:
        raw = f"{prefix}module.{name}_raw"
        if raw in state_dict:
            state_dict[f"{prefix}module.{name}"] = state_dict.pop(raw)


@contextlib.contextmanager
def _computing_with(module: nn.RNNBase, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Let a recurrent module compute with other tensors instead of some parameters.

    The module's forward pass gives the list ``_flat_weights`` to the fused kernel.
    ``functional_call`` would flatten all parameters of the module twice, once for the other tensors
    and once to restore its own.
    """
    names, own = torch_private.recurrent_weights(module)
    used = [weights.get(name, weight) for name, weight in zip(names, own, strict=True)]
    # Copy them into one buffer in cuDNN's order. Otherwise cuDNN would do so itself, with a
    # warning.
    if _runs_on_cudnn(used):
        used = list(_PackForCudnn.apply(module, *used))  # type: ignore[no-untyped-call]
    torch_private.set_recurrent_weights(module, used)
    try:
        yield
    finally:
        torch_private.set_recurrent_weights(module, own)


def _runs_on_cudnn(weights: Sequence[Any]) -> bool:
    """Return True if cuDNN accepts these weights of a recurrent module."""
    for weight in weights:
        if not isinstance(weight, Tensor) or not weight.is_cuda:
            return False
        if weight.dtype != weights[0].dtype or not torch.backends.cudnn.is_acceptable(weight):
            return False
    return True


class _PackForCudnn(torch.autograd.Function):
    """Copy weights into one new buffer; the gradient of a copy is that of its weight."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: FunctionCtx, module: nn.RNNBase, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        # Create new tensors on the same memory: flattening moves them into the buffer and leaves
        # the parameters alone.
        parts = []
        for weight in weights:
            parts.append(weight.new_empty(0).set_(weight.detach()))  # type: ignore[call-overload]
        with torch.cuda.device_of(parts[0]):
            torch_private.pack_for_cudnn(module, parts)
        return tuple(parts)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: FunctionCtx, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        # The copies have the values of the weights, so the gradients are the same.
        return (None, *gradients)
