r"""Losses with penalties on weights or activations, and with smoothed labels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlbench_core.arguments import check_at_least

__all__ = ["ActivationRegularization", "BCELossRegularized", "LabelSmoothing", "MSELossRegularized"]


class _Penalized(nn.Module):
    r"""A loss with a penalty on the weights of a model.

    .. math:: \lambda_1 \lVert w \rVert_1 + \frac{\lambda_2}{2} \lVert w \rVert_2^2

    Attributes:
        l1: Weight of the l1 norm.
        l2: Weight of half the squared l2 norm.
        model: The model whose weights are penalized; it is not a submodule of the loss.
    """

    l1: float = 0.0
    l2: float = 0.0
    model: nn.Module | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("l1", "l2"):
            check_at_least(name, value, 0)
            if value > 0 and self.model is None:
                raise ValueError(f"model must be given with {name}={value}, not None: pass model=")
        if name == "model":
            # nn.Module would register the model as a submodule, and loss.parameters() would return
            # its parameters.
            object.__setattr__(self, name, value)
        else:
            nn.Module.__setattr__(self, name, value)

    def _penalty(self) -> Tensor | float:
        penalty: Tensor | float = 0.0
        if self.model is None:
            return penalty
        for weight in self.model.parameters():
            # A norm whose factor is 0 is left out: 0 times an infinite norm would be nan.
            if self.l1 > 0:
                penalty = penalty + self.l1 * weight.abs().sum()
            if self.l2 > 0:
                penalty = penalty + self.l2 / 2 * weight.square().sum()
        return penalty


def _as_output(output: Tensor, target: Tensor) -> Tensor:
    """Return the target in the shape and dtype of the output.

    Otherwise, cross-entropy would refuse targets of shape (batch,) with outputs of shape (batch,
    1). A squared error would broadcast them to an unintended (batch, batch) matrix.

    Raises:
        ValueError: The shapes differ by more than a last dimension of 1.
    """
    if target.shape != output.shape:
        if (*target.shape, 1) != tuple(output.shape) and tuple(target.shape) != (*output.shape, 1):
            raise ValueError(
                f"target must have the shape of the output {tuple(output.shape)} up to a last "
                f"dimension of 1, not {tuple(target.shape)}"
            )
        target = target.reshape(output.shape)
    return target.to(output.dtype)


class ActivationRegularization(nn.Module):
    r"""Penalty on the size of a recurrent network's outputs, and on how they change over time.

    .. math::
        \alpha \operatorname{mean}_{tbf} (m \odot h)_{tbf}^2 +
        \beta \operatorname{mean}_{tbf} (h_{t+1} - h_t)_{bf}^2

    with the outputs :math:`h` of the last layer before dropout and :math:`m \odot h` after it:
    activation regularization (AR) and temporal activation regularization (TAR).

    Args:
        alpha: :math:`\alpha`, weight of AR, at least 0.
        beta: :math:`\beta`, weight of TAR, at least 0.

    Raises:
        ValueError: A weight is negative.

    Example:
        >>> penalty = ActivationRegularization(alpha=2.0, beta=1.0)
        >>> h = torch.tensor([1.0, 4.0]).reshape(2, 1, 1)
        >>> penalty(h, h).item()  # 2 (1 + 16) / 2 + 1 * 3^2
        26.0

    References:
        Merity, McCann and Socher 2017, Revisiting Activation Regularization for Language RNNs,
        arXiv 1708.01009.
    """

    def __init__(self, *, alpha: float = 2.0, beta: float = 1.0) -> None:
        super().__init__()
        check_at_least("alpha", alpha, 0)
        check_at_least("beta", beta, 0)
        self.alpha = alpha
        self.beta = beta

    def forward(self, dropped: Tensor, raw: Tensor) -> Tensor:
        """Compute the penalty of one batch.

        Args:
            dropped: Outputs after dropout, of shape (time, batch, features).
            raw: Outputs before dropout, the same shape.

        Returns:
            The penalty, no dimensions, to be added to the loss; without TAR for a single time step.
        """
        penalty = self.alpha * dropped.square().mean()
        # A single time step has no change over time: the mean of nothing would be nan.
        if len(raw) > 1:
            penalty = penalty + self.beta * (raw[1:] - raw[:-1]).square().mean()
        return penalty

    def extra_repr(self) -> str:
        """Return the arguments, for ``repr``."""
        return f"alpha={self.alpha}, beta={self.beta}"


class BCELossRegularized(_Penalized, nn.BCELoss):
    r"""Binary cross-entropy with a penalty on the model's weights, for logistic regression.

    .. math::
        -\frac{1}{n} \sum_{i=1}^{n} \bigl[ y_i \log p_i + (1 - y_i) \log (1 - p_i) \bigr]
        + \lambda_1 \lVert w \rVert_1 + \frac{\lambda_2}{2} \lVert w \rVert_2^2

    Here :math:`w` are all parameters of the model, including the bias.

    In float32, a probability is exactly 1 from a logit of about 17 on. For a wrong prediction
    beyond it, torch returns 100 instead of the true loss, and the gradient is 0, so training never
    corrects the mistake. If logits grow large (a high learning rate, features that are not scaled),
    let the model return logits :math:`z` with :math:`p = \sigma(z)`, and set ``logits=True``. The
    loss is then computed as

    .. math:: \max(z, 0) - y z + \log (1 + e^{-\lvert z \rvert})

    which is exact for every :math:`z`, and so is its gradient :math:`\sigma(z) - y`.

    scikit-learn's ``LogisticRegression(C=1 / (n * l2), fit_intercept=False)`` has the same minimum
    on data with a column of ones appended. The column makes its intercept a penalized weight, as
    the bias is here.

    Args:
        weight: Weight of each element of a batch, as in :class:`torch.nn.BCELoss`.
        size_average: Deprecated by torch, see ``reduction``.
        reduce: Deprecated by torch, see ``reduction``.
        l1: :math:`\lambda_1`, at least 0.
        l2: :math:`\lambda_2`, at least 0.
        model: The model. It may be left out if both penalties are 0.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``. The penalty is added once to a mean or a
            sum, and to each element with ``"none"``.
        logits: True if the input is logits instead of probabilities.

    Raises:
        ValueError: A penalty is negative, or has no model.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.constant_(model.weight, 2.0)
        >>> loss = BCELossRegularized(l1=0.5, l2=0.1, model=model)
        >>> value = loss(torch.tensor([1.0]), torch.tensor([1.0]))
        >>> round(value.item(), 6)  # 0 + 0.5 * 2 + 0.1 / 2 * 2^2
        1.2
        >>> loss = BCELossRegularized(logits=True)
        >>> loss(torch.tensor([30.0]), torch.tensor([0.0])).item()  # log(1 + e^30)
        30.0
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        reduce: bool | None = None,
        l1: float = 0.0,
        l2: float = 0.0,
        model: nn.Module | None = None,
        reduction: str = "mean",
        *,
        logits: bool = False,
    ) -> None:
        super().__init__(weight, size_average, reduce, reduction)
        self.model, self.l1, self.l2 = model, l1, l2
        self.logits = logits

    def forward(self, input_: Tensor, target: Tensor) -> Tensor:
        """Compute the loss of one batch.

        Args:
            input_: Probabilities, or logits with ``logits=True``; any shape.
            target: Between 0 and 1, the same shape up to a last dimension of 1.

        Returns:
            The loss, no dimensions unless ``reduction="none"``.

        Raises:
            ValueError: The shapes do not fit.
        """
        target = _as_output(input_, target)
        if self.logits:
            data_loss = F.binary_cross_entropy_with_logits(
                input_, target, self.weight, reduction=self.reduction
            )
        else:
            data_loss = super().forward(input_, target)
        return data_loss + self._penalty()


class MSELossRegularized(_Penalized, nn.MSELoss):
    r"""Mean squared error with a penalty on the model's weights.

    .. math:: \mathrm{MSE}(x, y) + \lambda_1 \lVert w \rVert_1 + \frac{\lambda_2}{2} \lVert w
      \rVert_2^2

    Here :math:`w` are all parameters of the model.

    Args:
        weight: Weight of each element, the shape of the input; a mean is then divided by the sum of
            the weights.
        size_average: Deprecated by torch, see ``reduction``.
        reduce: Deprecated by torch, see ``reduction``.
        l1: :math:`\lambda_1`, at least 0.
        l2: :math:`\lambda_2`, at least 0.
        model: The model. It may be left out if both penalties are 0.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``. The penalty is added once to a mean or a
            sum, and to each element with ``"none"``.

    Raises:
        ValueError: A penalty is negative, or has no model.
    """

    weight: Tensor | None

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        reduce: bool | None = None,
        l1: float = 0.0,
        l2: float = 0.0,
        model: nn.Module | None = None,
        reduction: str = "mean",
    ) -> None:
        super().__init__(size_average, reduce, reduction)
        self.register_buffer("weight", weight)
        self.model, self.l1, self.l2 = model, l1, l2

    def forward(self, input_: Tensor, target: Tensor) -> Tensor:
        """Compute the loss of one batch.

        Args:
            input_: Predictions, any shape.
            target: The correct values, the same shape up to a last dimension of 1.

        Returns:
            The loss, no dimensions unless ``reduction="none"``.

        Raises:
            ValueError: The shapes do not fit, or ``weight`` has another shape than the input.
        """
        target = _as_output(input_, target)
        if self.weight is None:
            return super().forward(input_, target) + self._penalty()
        if self.weight.shape != input_.shape:
            raise ValueError(
                "weight must have the shape of the input "
                f"{tuple(input_.shape)}, not {tuple(self.weight.shape)}"
            )
        errors = self.weight * F.mse_loss(input_, target, reduction="none")
        if self.reduction == "none":
            return errors + self._penalty()
        total = errors.sum()
        if self.reduction == "mean":
            # A weighted mean is divided by the sum of the weights, not by their number.
            total = total / self.weight.sum()
        return total + self._penalty()


class LabelSmoothing(nn.Module):
    r"""Cross-entropy against smoothed labels, summed over all tokens except padding.

    .. math::
        \sum_{i:\, y_i \ne \text{pad}}
        -(1 - \varepsilon) \log p_i(y_i) - \frac{\varepsilon}{C} \sum_{c=1}^{C} \log p_i(c)

    with smoothing :math:`\varepsilon` and :math:`C` classes.

    Args:
        padding_idx: Target id that is left out.
        smoothing: :math:`\varepsilon`, from 0 to 1.
        fast_xentropy: True to use torch's fused cross-entropy, which needs no (tokens, classes)
            matrix of log-probabilities in memory. False computes the formula above step by step.

    Raises:
        ValueError: ``smoothing`` is outside of 0 to 1.

    References:
        Szegedy et al. 2015, Rethinking the Inception Architecture for Computer Vision, arXiv
        1512.00567.

    Example:
        >>> loss = LabelSmoothing(padding_idx=0, smoothing=0.1)
        >>> x = torch.zeros(3, 4)  # every class has probability 1/4
        >>> value = loss(x, torch.tensor([1, 2, 0]))  # the padded token is left out
        >>> round(value.item() / 2, 4)  # log(4)
        1.3863
    """

    def __init__(
        self, padding_idx: int, smoothing: float = 0.0, fast_xentropy: bool = False
    ) -> None:
        super().__init__()
        if not 0.0 <= smoothing <= 1.0:
            raise ValueError(f"smoothing must be from 0 to 1, not {smoothing}")
        self.padding_idx = padding_idx
        self.smoothing = smoothing
        self.fast_xentropy = fast_xentropy

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Compute the summed loss of one batch.

        Args:
            x: Scores of shape (..., classes), or log-probabilities, which the softmax leaves as
                they are. Half precision is computed in float32.
            target: Token ids of shape (...).

        Returns:
            The sum of the losses, no dimensions; divide it by the number of tokens for a mean.

        Raises:
            ValueError: The shapes do not fit.
        """
        if x.shape[:-1].numel() != target.numel():
            raise ValueError(
                "x must be (..., classes) and target (...), not "
                f"{tuple(x.shape)} and {tuple(target.shape)}"
            )
        x, target = x.reshape(-1, x.shape[-1]), target.reshape(-1)
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.fast_xentropy:
            return self._fused(x, target)
        return self._plain(x, target)

    def _plain(self, x: Tensor, target: Tensor) -> Tensor:
        log_p = F.log_softmax(x, dim=-1)
        counted = target != self.padding_idx
        # A padding id may lie outside of the classes (for example -100), where gather() fails. So
        # padding reads class 0 here, and its row is left out below.
        nll = -log_p.gather(1, target.where(counted, 0).unsqueeze(1)).squeeze(1)
        uniform = -log_p.mean(dim=-1)
        losses = (1.0 - self.smoothing) * nll + self.smoothing * uniform
        return losses.masked_fill(~counted, 0.0).sum()

    def _fused(self, x: Tensor, target: Tensor) -> Tensor:
        # torch spreads the smoothing over all classes, including the target's, as the formula does.
        return F.cross_entropy(
            x,
            target,
            ignore_index=self.padding_idx,
            reduction="sum",
            label_smoothing=self.smoothing,
        )

    def extra_repr(self) -> str:
        """Return the arguments, for ``repr``."""
        return (
            f"padding_idx={self.padding_idx}, smoothing={self.smoothing}, "
            f"fast_xentropy={self.fast_xentropy}"
        )
