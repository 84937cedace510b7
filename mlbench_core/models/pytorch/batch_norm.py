"""Batch normalization over the joint batch of all workers, on every backend."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mlbench_core.distributed.pytorch import process_groups
from mlbench_core.torch_private import check_batch_norm_input

__all__ = ["DistributedBatchNorm2d", "convert_batch_norm"]


class DistributedBatchNorm2d(nn.BatchNorm2d):
    r"""Batch normalization with the mean and the variance over the batches of all workers.

    With the :math:`n` values :math:`x` of a channel in the batches of all workers,

    .. math::
        \mu = \frac{1}{n} \sum x, \qquad \sigma^2 = \frac{1}{n} \sum (x - \mu)^2, \qquad
        y = \gamma \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta.

    Workers with batches of :math:`b` images then compute the same as one worker with all of them,
    up to rounding. With :class:`torch.nn.BatchNorm2d` each worker normalizes by its own batch, so
    :math:`k` workers train a different network than one worker. The cost is two small messages in
    the forward pass and two in the backward pass. All workers wait for each of them. The plain
    tensor operations show the computation and also run on CPUs. :class:`torch.nn.SyncBatchNorm` is
    faster on GPUs but does not support CPUs.

    Arguments, parameters, buffers and evaluation mode are those of :class:`torch.nn.BatchNorm2d`.

    Example:
        >>> norm = DistributedBatchNorm2d(3)
        >>> normalized = norm(torch.arange(24.0).reshape(2, 3, 2, 2))
        >>> bool(normalized.mean().abs() < 1e-6)
        True

    References:
        Ioffe and Szegedy: Batch Normalization. arXiv:1502.03167
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalize a batch.

        Args:
            input: Shape (batch, channels, height, width), the same channels on every worker.

        Returns:
            The same shape and dtype.
        """
        if not self.training:
            return super().forward(input)
        check_batch_norm_input(self, input)
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        # Send the number of values with the sums: workers may have batches of different sizes.
        count = x.new_tensor([x.numel() / x.shape[1]])
        sums = process_groups.sum_over_workers(torch.cat([x.sum(dim=(0, 2, 3)), count]))
        n = sums[-1].detach()
        mean = sums[:-1] / n
        # A second message for the variance, because E[x^2] - mean^2 loses digits if the mean is
        # large.
        centered = x - mean[:, None, None]
        variance = process_groups.sum_over_workers(centered.square().sum(dim=(0, 2, 3))) / n
        # The running variance is the unbiased one, as in torch.
        unbiased = variance.detach() * (n / (n - 1).clamp(min=1))
        self._update_running_statistics(mean.detach(), unbiased)
        scale = torch.rsqrt(variance + self.eps)
        if self.affine:
            scale = scale * self.weight
        y = centered * scale[:, None, None]
        if self.affine:
            y = y + self.bias[:, None, None]
        return y.to(input.dtype)

    @torch.no_grad()
    def _update_running_statistics(self, mean: Tensor, variance: Tensor) -> None:
        """Update the running statistics with those of a batch."""
        if not self.track_running_stats:
            return
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        weight = self.momentum
        if weight is None:
            # Without a momentum, torch averages over all batches.
            weight = 1 / self.num_batches_tracked.item()
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
        self.running_var.lerp_(variance.to(self.running_var.dtype), weight)


def convert_batch_norm(model: nn.Module) -> nn.Module:
    """Replace every :class:`torch.nn.BatchNorm2d` of a model by a :class:`DistributedBatchNorm2d`.

    The new layers have the parameters and buffers of the old ones, so an existing optimizer remains
    valid.

    Args:
        model: The model, which is changed in place.

    Returns:
        The model, or the new layer if the model is itself a :class:`torch.nn.BatchNorm2d`.

    Example:
        >>> type(convert_batch_norm(nn.Sequential(nn.BatchNorm2d(3)))[0]).__name__
        'DistributedBatchNorm2d'
    """
    # Compare the exact type: subclasses, such as the distributed one, must not be converted.
    if type(model) is nn.BatchNorm2d:
        new = DistributedBatchNorm2d(
            model.num_features, model.eps, model.momentum, model.affine, model.track_running_stats
        )
        # Use the same tensors, not copies: an optimizer may hold them already.
        new.weight, new.bias = model.weight, model.bias
        new.running_mean, new.running_var = model.running_mean, model.running_var
        new.num_batches_tracked = model.num_batches_tracked
        return new.train(model.training)
    for name, child in model.named_children():
        setattr(model, name, convert_batch_norm(child))
    return model
