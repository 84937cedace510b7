"""AWD-LSTM, the weight-dropped LSTM language model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlbench_core.arguments import check_at_least
from mlbench_core.models.pytorch.autocast import AutocastLSTM
from mlbench_core.models.pytorch.layers.dropout_layers import (
    LockedDropout,
    WeightDrop,
    check_probability,
    embedded_dropout,
)

__all__ = ["LSTMHidden", "LSTMLanguageModel"]

LSTMHidden: TypeAlias = "list[tuple[Tensor, Tensor]]"

SCORES_AT_ONCE = 2**23
"""Number of scores that :meth:`LSTMLanguageModel.loss` computes at a time; 32 MiB in float32."""


class LSTMLanguageModel(nn.Module):
    r"""AWD-LSTM (Merity et al. 2017), which predicts each word from the words before it.

    It consists of embeddings, a stack of LSTM layers and a linear decoder, with dropout between any
    two of them:

    .. math::
        x^0_t &= \mathrm{locked}_{\text{dropouti}}(E_{w_t})
            \quad \text{(words dropped with dropoute)} \\
        y^l_t, s^l_t &= \mathrm{LSTM}^l(x^{l-1}_t, s^l_{t-1})
            \quad \text{(recurrent weights dropped with wdrop)} \\
        x^l_t &= \mathrm{locked}_{\text{dropouth}}(y^l_t), \qquad
            x^L_t = \mathrm{locked}_{\text{dropout}}(y^L_t) \\
        z_t &= W x^L_t + b

    The softmax of the scores :math:`z` gives probabilities. The first layer reads ``ninp``
    features. The last layer has ``ninp`` outputs with tied weights (:math:`W = E`, so that the
    decoder adds only :math:`b`) and ``nhid`` without. All other widths are ``nhid``. In evaluation
    mode nothing is dropped, and the layers are plain :class:`torch.nn.LSTM`.

    Weights of embeddings and decoder start uniform in (-0.1, 0.1), the bias 0. The LSTM weights
    start as in torch.

    Attributes:
        encoder: The embedding.
        rnns: The LSTM layers, each in a
            :class:`~mlbench_core.models.pytorch.layers.dropout_layers.WeightDrop`.
        decoder: The decoder.
        widths: Width of each LSTM layer.

    Args:
        ntoken: Words in the vocabulary.
        ninp: Width of the embeddings.
        nhid: Width of the LSTM layers.
        nlayers: Number of LSTM layers.
        dropout: Probability of dropping an output of the last layer.
        dropouth: The same for outputs of the other layers.
        dropouti: The same for features of the embeddings.
        dropoute: The same for words.
        wdrop: The same for the weights from hidden state to hidden state.
        tie_weights: If True, the decoder uses the embeddings as its weights.

    Raises:
        ValueError: A size is not positive, or a probability is outside of 0 to 1.

    Example:
        >>> import torch
        >>> model = LSTMLanguageModel(ntoken=11, ninp=4, nhid=6, nlayers=2, tie_weights=True)
        >>> words = torch.zeros(5, 3, dtype=torch.int64)  # 5 words of 3 sequences
        >>> scores, hidden = model(words, model.init_hidden(3))
        >>> scores.shape, [h.shape[2] for h, _ in hidden]
        (torch.Size([15, 11]), [6, 4])

    References:
        Merity, Keskar and Socher 2017, Regularizing and Optimizing LSTM Language Models, arXiv
        1708.02182.

        Press and Wolf 2017, Using the Output Embedding to Improve Language Models, arXiv
        1608.05859.
    """

    def __init__(
        self,
        ntoken: int,
        ninp: int,
        nhid: int,
        nlayers: int,
        dropout: float = 0.5,
        dropouth: float = 0.5,
        dropouti: float = 0.5,
        dropoute: float = 0.1,
        wdrop: float = 0,
        tie_weights: bool = False,
    ) -> None:
        super().__init__()
        sizes = {"ntoken": ntoken, "ninp": ninp, "nhid": nhid, "nlayers": nlayers}
        for name, size in sizes.items():
            check_at_least(name, size, 1)
        self.ntoken = ntoken
        self.ninp = ninp
        self.nhid = nhid
        self.nlayers = nlayers
        self.dropoute = check_probability("dropoute", dropoute)
        self.tie_weights = tie_weights
        last = nhid
        if tie_weights:
            # The decoder's input has then the width of the embeddings.
            last = ninp
        self.widths = [*[nhid] * (nlayers - 1), last]
        self.drop_input = LockedDropout(check_probability("dropouti", dropouti))
        self.drop_hidden = LockedDropout(check_probability("dropouth", dropouth))
        self.drop_output = LockedDropout(check_probability("dropout", dropout))
        self.encoder = nn.Embedding(ntoken, ninp)
        check_probability("wdrop", wdrop)
        self.rnns = nn.ModuleList()
        for input_size, width in itertools.pairwise([ninp, *self.widths]):
            # weight_hh_l0 are a layer's recurrent weights, from hidden state to hidden state.
            layer = WeightDrop(AutocastLSTM(input_size, width), ["weight_hh_l0"], wdrop)
            self.rnns.append(layer)
        self.decoder = nn.Linear(last, ntoken)
        self.init_weights()

    def init_weights(self) -> None:
        """Draw embeddings and decoder again; tied weights are one parameter afterwards."""
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        if self.tie_weights:
            self.decoder.weight = self.encoder.weight
        else:
            nn.init.uniform_(self.decoder.weight, -0.1, 0.1)

    def init_hidden(self, bsz: int) -> LSTMHidden:
        """Return the state before the first word, which is zero.

        Args:
            bsz: Number of sequences.

        Returns:
            The pair (h, c) for each layer, both of shape (1, ``bsz``, width), in the model's dtype
            and on its device.
        """
        zeros = self.encoder.weight.new_zeros
        return [(zeros(1, bsz, width), zeros(1, bsz, width)) for width in self.widths]

    @overload
    def forward(
        self, input: Tensor, hidden: Sequence[tuple[Tensor, Tensor]], return_h: Literal[False] = ...
    ) -> tuple[Tensor, LSTMHidden]: ...

    @overload
    def forward(
        self, input: Tensor, hidden: Sequence[tuple[Tensor, Tensor]], return_h: Literal[True]
    ) -> tuple[Tensor, LSTMHidden, list[Tensor], list[Tensor]]: ...

    def forward(
        self, input: Tensor, hidden: Sequence[tuple[Tensor, Tensor]], return_h: bool = False
    ) -> tuple[Tensor, LSTMHidden] | tuple[Tensor, LSTMHidden, list[Tensor], list[Tensor]]:
        """Return the scores of the next word after each word.

        Args:
            input: Ids of shape (time, batch), integers.
            hidden: State before the first of them, as :meth:`init_hidden` or an earlier call
                returned it. Detach it to stop back-propagation there.
            return_h: If True, return the layers' outputs too.

        Returns:
            ``(scores, hidden)``: scores of shape (time * batch, ``ntoken``), the first time step
            first, in the form that :func:`torch.nn.functional.cross_entropy` takes; and the state
            after the last word. With ``return_h`` two more lists for activation regularization: the
            layers' outputs :math:`y^l` before and :math:`x^l` after dropout, each of shape (time,
            batch, width).
        """
        raw_outputs, outputs, new_hidden = self.encode(input, hidden)
        # Compute the scores of all time steps in one matrix product, not in one for each step.
        scores = self.decoder(outputs[-1].flatten(0, 1))
        if return_h:
            return scores, new_hidden, raw_outputs, outputs
        return scores, new_hidden

    def encode(
        self, input: Tensor, hidden: Sequence[tuple[Tensor, Tensor]]
    ) -> tuple[list[Tensor], list[Tensor], LSTMHidden]:
        """Return the layers' outputs and the new state, without the scores.

        Args:
            input: As in :meth:`forward`.
            hidden: As in :meth:`forward`.

        Returns:
            The layers' outputs before and after dropout, each of shape (time, batch, width), and
            the state after the last word. :meth:`loss` takes the last output after dropout.
        """
        # A function has no evaluation mode, unlike the other kinds of dropout here.
        dropoute = 0.0
        if self.training:
            dropoute = self.dropoute
        x = self.drop_input(embedded_dropout(self.encoder, input, dropoute))
        raw_outputs, outputs, new_hidden = [], [], []
        for number, (rnn, state) in enumerate(zip(self.rnns, hidden, strict=True), start=1):
            raw, state = rnn(x, state)
            if number < self.nlayers:
                x = self.drop_hidden(raw)
            else:
                x = self.drop_output(raw)
            raw_outputs.append(raw)
            outputs.append(x)
            new_hidden.append(state)
        return raw_outputs, outputs, new_hidden

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of the next words.

        On a CPU in float32, compute the scores in pieces of about eight million, and their
        gradients with them. Only the scores of one piece are in memory at once. The matrix products
        are those of oneDNN, if torch has it and it is enabled. On an AMD EPYC, a training step is
        1.67 times (a small model) and 1.38 times (a full one) as fast as the usual way
        (``benchmarks/micro/awd_lstm.py``). Such a loss has first derivatives only:
        ``create_graph=True`` raises a RuntimeError in the backward pass.

        Args:
            output: The last layer's output of shape (time, batch, width), from :meth:`encode`.
            targets: Ids of the next words, shape (time * batch,), integers.

        Returns:
            The loss, a float32 tensor without dimensions. It is that of
            :func:`torch.nn.functional.cross_entropy` for the scores of :meth:`forward`, up to
            rounding.

        Raises:
            ValueError: ``targets`` has another shape.
        """
        x = output.flatten(0, 1)
        if targets.shape != x.shape[:1]:
            raise ValueError(
                f"targets must have shape ({len(x)},), one word for each of the outputs, not "
                f"{tuple(targets.shape)}: flatten the words in the order of time"
            )
        is_float32_on_cpu = x.device.type == "cpu" and x.dtype == torch.float32
        # Within autocast, products are computed in another dtype.
        if not is_float32_on_cpu or torch.is_autocast_enabled("cpu"):
            return F.cross_entropy(self.decoder(x).float(), targets)
        # A vocabulary may have more words than the scores that are computed at once.
        rows = max(1, SCORES_AT_ONCE // self.ntoken)
        weight, bias = self.decoder.weight, self.decoder.bias
        if torch.is_grad_enabled():
            loss: Tensor = _LossInPieces.apply(x, weight, bias, targets, rows)
            return loss
        losses = []
        for piece, its_targets in zip(x.split(rows), targets.split(rows), strict=True):
            losses.append(_sum_of_losses(piece, its_targets, weight, bias))
        return torch.stack(losses).sum() / _count(targets)


def _sum_of_losses(x: Tensor, targets: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the sum of the cross-entropies of some words."""
    if torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled:
        # On x86, torch multiplies float32 matrices with oneDNN by default only if a tensor has this
        # layout.
        scores = F.linear(x.to_mkldnn(), weight, bias).to_dense()
    else:
        scores = F.linear(x, weight, bias)
    return F.cross_entropy(scores, targets, reduction="sum")


def _count(targets: Tensor) -> Tensor:
    """Return the number of targets that cross_entropy does not ignore."""
    # Its ignore_index is -100 by default. In uint8, -100 would be 156, a valid word.
    return (targets.long() != -100).sum()


class _LossInPieces(torch.autograd.Function):
    """The mean cross-entropy; it computes the gradients of a few rows right after their scores."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, rows: int
    ) -> Tensor:
        count = _count(targets)
        losses, of_x = [], []
        of_parameters = [torch.zeros_like(weight), torch.zeros_like(bias)]
        for piece, its_targets in zip(x.split(rows), targets.split(rows), strict=True):
            # The forward pass of a Function records no graph, from which the gradients come.
            with torch.enable_grad():
                # Detached, so that this graph ends here and is freed with the piece.
                inputs = [tensor.detach().requires_grad_() for tensor in (piece, weight, bias)]
                loss = _sum_of_losses(inputs[0], its_targets, *inputs[1:]) / count
            of_piece, *further = torch.autograd.grad(loss, inputs)
            losses.append(loss.detach())
            of_x.append(of_piece)
            for total, gradient in zip(of_parameters, further, strict=True):
                total += gradient
        # The gradients are saved instead of the inputs, and the backward pass only scales them.
        ctx.save_for_backward(torch.cat(of_x), *of_parameters)
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # Operations are recorded here only with create_graph=True. Without the error, the saved
        # gradients would count as constants in a second derivative.
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph must be False for LSTMLanguageModel.loss on a "
                "CPU, which has first derivatives only: for second ones, "
                "compute cross_entropy from the scores of forward"
            )
        return *(gradient * saved for saved in ctx.saved_tensors), None, None
