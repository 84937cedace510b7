"""Batch normalisation over the joint batch of all workers, on every backend."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mlbench_core.distributed.pytorch import process_groups

__all__ = ["DistributedBatchNorm2d", "convert_batch_norm"]


class DistributedBatchNorm2d(nn.BatchNorm2d):
    r"""Batch normalisation whose mean and variance are those of all workers' batches together.

    With the :math:`n` values :math:`x` of a channel in the batches of all workers,

    .. math::
        \mu = \frac{1}{n} \sum x, \qquad \sigma^2 = \frac{1}{n} \sum (x - \mu)^2, \qquad
        y = \gamma \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta.

    Workers with batches of :math:`b` images then compute what one worker with all of them computes, but for rounding;
    with :class:`torch.nn.BatchNorm2d` each normalises by its own batch, and :math:`k` workers train another network
    than one. It costs two small messages in the forward pass and two in the backward pass, each of which everyone waits
    for. Written in plain tensor operations: it shows what is computed, on CPUs too, where
    :class:`torch.nn.SyncBatchNorm` does not run; that one is faster on GPUs.

    Arguments, parameters, buffers and evaluation mode are those of :class:`torch.nn.BatchNorm2d`.

    Example:
        >>> norm = DistributedBatchNorm2d(3)
        >>> normalised = norm(torch.arange(24.0).reshape(2, 3, 2, 2))
        >>> bool(normalised.mean().abs() < 1e-6)
        True

    References:
        Ioffe and Szegedy: Batch Normalization. arXiv:1502.03167
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalise.

        Args:
            input: Shape (batch, channels, height, width), the same channels on every worker.

        Returns:
            The same shape and dtype.
        """
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        count = x.new_tensor([x.numel() / x.shape[1]])
        sums = process_groups.sum_over_workers(torch.cat([x.sum(dim=(0, 2, 3)), count]))
        n = sums[-1].detach()
        mean = sums[:-1] / n
        centred = x - mean[:, None, None]
        variance = process_groups.sum_over_workers(centred.square().sum(dim=(0, 2, 3))) / n
        self._remember(mean.detach(), variance.detach() * (n / (n - 1).clamp(min=1)))
        scale = torch.rsqrt(variance + self.eps)
        if self.affine:
            scale = scale * self.weight
        y = centred * scale[:, None, None]
        if self.affine:
            y = y + self.bias[:, None, None]
        return y.to(input.dtype)

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        """Let the running statistics take in a batch's."""
        if not self.track_running_stats:
            return
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


def convert_batch_norm(model: nn.Module) -> nn.Module:
    """Make every :class:`torch.nn.BatchNorm2d` of a model normalise over the batches of all workers.

    The new layers have the parameters and buffers of the old ones, so an optimizer that was made before goes on.

    Args:
        model: The model; layers inside it are replaced.

    Returns:
        The model, or the new layer where the model is a batch norm itself.

    Example:
        >>> type(convert_batch_norm(nn.Sequential(nn.BatchNorm2d(3)))[0]).__name__
        'DistributedBatchNorm2d'
    """
    if type(model) is nn.BatchNorm2d:
        return _converted(model)
    for name, child in model.named_children():
        setattr(model, name, convert_batch_norm(child))
    return model


def _converted(norm: nn.BatchNorm2d) -> DistributedBatchNorm2d:
    """The distributed counterpart of a layer, around the same tensors."""
    new = DistributedBatchNorm2d(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
    new.weight, new.bias = norm.weight, norm.bias
    new.running_mean, new.running_var = norm.running_mean, norm.running_var
    new.num_batches_tracked = norm.num_batches_tracked
    return new.train(norm.training)
