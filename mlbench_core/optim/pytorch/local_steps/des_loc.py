"""Adam on every worker, with averages of weights and moments in three periods (DES-LOC)."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import required

from mlbench_core.aggregation.pytorch.aggregation import Denominator, parameters_of
from mlbench_core.aggregation.pytorch.local_steps.des_loc import DESLOCAggregation, check_adam
from mlbench_core.optim.pytorch.distributed import GenericCentralizedOptimizer, check_aggregation
from mlbench_core.optim.pytorch.local_steps.periodic import make_inner_optimizer

__all__ = ["DESLOC"]


class DESLOC(GenericCentralizedOptimizer):
    r"""Local AdamW, whose weights and moments are averaged at different times.

    Every worker takes steps of AdamW with its own gradients. After every :math:`K_x`-th step, all
    average their weights, after every :math:`K_u`-th their first moments, and after every
    :math:`K_v`-th their second moments; see
    :class:`~mlbench_core.aggregation.pytorch.local_steps.des_loc.DESLOCAggregation`. Moments change
    more slowly than weights, so they need fewer averages. With three equal periods, this is local
    Adam. See :class:`~mlbench_core.optim.pytorch.local_steps.periodic.LocalSGD` for when to
    evaluate, and for frozen layers.

    The paper clips the gradients of each worker before the step. According to a secondary text, its
    algorithm clips each coordinate, and its experiments the norm. A script clips the norm with
    :func:`torch.nn.utils.clip_grad_norm_`.

    Args:
        lr: Learning rate.
        betas: Decay of the first and of the second moment.
        eps: Added to the denominator.
        weight_decay: Decoupled weight decay.
        period: :math:`K_x`; None for 8.
        first_moment_period: :math:`K_u`; None for :math:`3 K_x`.
        second_moment_period: :math:`K_v`; None for :math:`6 K_x`.
        aggregation: The averages with all their settings, instead of the periods.

    Other arguments: see
    :class:`~mlbench_core.optim.pytorch.distributed.GenericCentralizedOptimizer`.

    Raises:
        TypeError: A period is not an integer, ``lr`` is not a number, or the aggregation is not a
            :class:`~mlbench_core.aggregation.pytorch.local_steps.des_loc.DESLOCAggregation`.
        ValueError: ``model`` or ``lr`` is missing, a number is out of range, ``world_size`` is not
            that of the process group, or an argument contradicts the aggregation.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1)
        >>> optimizer = DESLOC(model=model, lr=0.001, period=4)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()

    References:
        A. Iacob et al.: DES-LOC: Desynced Low Communication Adaptive Optimizers for Training
        Foundation Models. arXiv:2505.22549
    """

    aggregation: DESLOCAggregation

    def __init__(
        self,
        world_size: int | None = None,
        model: nn.Module | None = None,
        lr: float = required,  # type: ignore[assignment]
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        use_cuda: bool = False,
        by_layer: bool = False,
        *,
        period: int | None = None,
        first_moment_period: int | None = None,
        second_moment_period: int | None = None,
        aggregation: DESLOCAggregation | None = None,
    ) -> None:
        options = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
        inner = make_inner_optimizer("DESLOC", None, model, lr, **options)
        periods = {
            "first_moment_period": first_moment_period,
            "second_moment_period": second_moment_period,
        }
        if aggregation is None:
            steps = 8
            if period is not None:
                steps = period
            aggregation = DESLOCAggregation(world_size, steps, use_cuda=use_cuda, **periods)
        check_aggregation(
            aggregation,
            DESLOCAggregation,
            world_size=world_size,
            use_cuda=use_cuda or None,
            period=period,
            **periods,
        )
        super().__init__(
            None,
            model,
            by_layer=by_layer,
            agg_grad=False,
            optimizer=inner,
            aggregation=aggregation,
        )

    def check_inside(self, optimizer: Optimizer) -> None:
        """Raise an error for an optimizer other than Adam or AdamW of the model's parameters."""
        super().check_inside(optimizer)
        check_adam(optimizer)

    def _communicate(self, denom: Denominator | None) -> None:
        """Average what is due, with the moments of the wrapped optimizer."""
        named = parameters_of(self.model)
        extra = self.extra_parameters(self.model.parameters())
        # Every time, because the wrapped optimizer can be swapped, and a state can be loaded.
        self.aggregation.watch({**named, **extra}, self._inner)
        super()._communicate(denom)
