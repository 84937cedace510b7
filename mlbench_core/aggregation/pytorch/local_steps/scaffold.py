"""Average weights of workers that correct their gradients by control variates (SCAFFOLD)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mlbench_core.aggregation.pytorch.aggregation import Aggregation, Denominator, trainable
from mlbench_core.aggregation.pytorch.all_reduce import AllReduceAggregation
from mlbench_core.aggregation.pytorch.decentralized import check_average, refuse_gradients
from mlbench_core.aggregation.pytorch.transport.names import by_plain_name, check_keys, is_buffer

__all__ = ["ScaffoldAggregation"]


class ScaffoldAggregation(Aggregation):
    r"""Average weights, and learn how each worker's gradients differ from those of all workers.

    Worker :math:`i` of :math:`k` has a control variate :math:`c_i` for each tensor, an estimate of
    its mean gradient. All workers share their average :math:`c`. All are zero at first. From the
    common weights :math:`x`, the worker takes :math:`K` local steps with the gradient
    :math:`g_i(y_i) - c_i + c` (:meth:`correction`) and the learning rates :math:`\eta_1, \ldots,
    \eta_K` (:meth:`count`) to :math:`y_i`. With :math:`S = \sum_t \eta_t`, a call computes

    .. math::

        c_i &\leftarrow c_i - c + \frac{1}{S} (x - y_i) \\
        c &\leftarrow \frac{1}{S} \Bigl(x - \frac{1}{k} \sum_i y_i\Bigr) \\
        x &\leftarrow \frac{1}{k} \sum_i y_i, \qquad y_i \leftarrow x.

    The first line is the paper's option II, in which :math:`S = K \eta`; the new :math:`c_i` is the
    average of the local gradients. The second line is the paper's :math:`c + \frac{1}{k} \sum_i
    (c_i' - c_i)` if all workers take part: both are equal, but this one needs no message. So a call
    sends the bytes of the tensors, half of what implementations that also send the control variates
    do. The paper's global step size is 1 here. Its option I (a pass over the data for :math:`c_i`)
    and its sampling of workers are left out. A single worker takes the steps of SGD.

    A parameter takes no local step while this worker has no gradient of it, but the rates count.
    Parameters that are added later are averaged at their first aggregation and have control
    variates from then on. The control variates and :math:`x` are kept at least in float32.

    Args:
        world_size: Number of workers; None takes that of the process group.
        use_cuda: See :class:`~mlbench_core.aggregation.pytorch.aggregation.Aggregation`.
        process_group: See
            :class:`~mlbench_core.aggregation.pytorch.all_reduce.AllReduceAggregation`.

    Raises:
        ValueError: ``world_size`` is not the number of workers in the process group.

    Example:
        >>> weights, aggregation = {"x": torch.tensor([1.0])}, ScaffoldAggregation()
        >>> aggregation.start({"x": nn.Parameter(weights["x"])})
        >>> aggregation.count("x", 0.5)
        >>> weights["x"] -= 0.5 * 3.0  # a local step with the gradient 3
        >>> aggregation.aggregate(weights, "avg_world")
        >>> aggregation.state_dict()["common"]["x"]
        tensor([3.])

    References:
        Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled Averaging
        for Federated Learning. arXiv:1910.06378
    """

    _named_state = ("shared", "common", "own", "rates")
    _own_state = ("own",)

    def __init__(
        self, world_size: int | None = None, use_cuda: bool = False, *, process_group: Any = None
    ) -> None:
        super().__init__(use_cuda=use_cuda, process_group=process_group)
        self._all_reduce = AllReduceAggregation(
            world_size, use_cuda=use_cuda, process_group=process_group
        )
        self._shared: dict[str, Tensor] = {}  # x
        self._common: dict[str, Tensor] = {}  # c
        self._own: dict[str, Tensor] = {}  # c_i
        self._rates: dict[str, float] = {}  # S since the last call

    # Control variates are computed from weights, so aggregating gradients
    # would leave them as they are.
    agg_grad = refuse_gradients

    def start(self, model: nn.Module | Mapping[str, Tensor]) -> None:
        """Use a model's weights, equal on all workers, as :math:`x`. A second call does nothing.

        Args:
            model: The model before its first step, or a mapping from names to parameters.
        """
        if not self._shared:
            for name, parameter in trainable(model):
                self._share(name, parameter)

    def count(self, name: str, lr: float) -> None:
        """Count a local step of a parameter that has shared weights.

        The rates of all workers count alike, also on a worker that has frozen the parameter.

        Args:
            name: Name of the parameter.
            lr: Learning rate of the step, the same on all workers.
        """
        if name in self._shared:
            self._rates[name] = self._rates.get(name, 0.0) + lr

    def correction(self, name: str) -> Tensor | None:
        """Return :math:`c - c_i`, which corrects this worker's gradients; None at first.

        Args:
            name: Name of the parameter.
        """
        if name not in self._common:
            return None
        return self._common[name] - self._own[name]

    @torch.no_grad()
    def aggregate(
        self, tensors: Mapping[str, Tensor], op: str, denom: Denominator | None = None
    ) -> None:
        """Update the control variates and replace every tensor by the workers' average.

        Args:
            tensors: By name, in the same order with the same shapes and dtypes on every worker.
            op: ``"avg_world"``.
            denom: Not used.

        Raises:
            UnknownOperationError: ``op`` is another one.
            ValueError: A tensor does not have the shape of its shared weights.
        """
        check_average(op)
        # Without a step there is no gradient to learn from.
        stepped = set()
        for name, y_i in tensors.items():
            if name in self._shared and self._rates.get(name, 0.0) > 0:
                stepped.add(name)
                self._update_own(name, y_i)
        self._delegate(self._all_reduce, tensors, op, denom)
        for name, average in tensors.items():
            if name in stepped:
                # c = (x - mean of y_i) / S, with the x of the last call; it needs no message.
                self._common[name] = (self._shared[name] - average).div_(self._rates[name])
            if not is_buffer(name):
                self._share(name, average)
                self._rates[name] = 0.0

    def _update_own(self, name: str, y_i: Tensor) -> None:
        r"""Add :math:`(x - y_i) / S - c` to :math:`c_i`, in place."""
        x = self._shared[name]
        if x.shape != y_i.shape:
            raise ValueError(
                f"{name!r} must have the shape {tuple(x.shape)} of its shared weights, not "
                f"{tuple(y_i.shape)}: load a state of this model"
            )
        # The model may have moved to another device or dtype since the last
        # call or since the checkpoint.
        dtype = torch.promote_types(y_i.dtype, torch.float32)
        for kept in (self._shared, self._common, self._own):
            if name in kept:
                kept[name] = kept[name].to(y_i.device, dtype)
        x = self._shared[name]
        own = self._own.setdefault(name, torch.zeros_like(x))
        if name in self._common:
            own.sub_(self._common[name])
        own.add_(x - y_i, alpha=1 / self._rates[name])

    def _share(self, name: str, weights: Tensor) -> None:
        dtype = torch.promote_types(weights.dtype, torch.float32)
        self._shared[name] = weights.detach().to(dtype, copy=True)

    def state_dict(self) -> dict[str, Any]:
        """Return by parameter name the shared weights, the control variates, and the sums of rates.

        The keys are ``"shared"``, ``"common"``, ``"own"`` and ``"rates"``; an empty dictionary
        before the start.
        """
        if not self._shared:
            return {}
        return {
            "shared": dict(self._shared),
            "common": dict(self._common),
            "own": dict(self._own),
            "rates": dict(self._rates),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`.

        An empty state starts again from the weights at the next step.

        A worker without own control variates takes the common ones, so that its first
        gradients are not corrected.

        Raises:
            ValueError: It is another aggregation's state.
        """
        if state_dict:
            check_keys(self, state_dict, ("shared", "common", "own", "rates"))
        self._shared = by_plain_name(state_dict.get("shared", {}))
        self._common = by_plain_name(state_dict.get("common", {}))
        own = by_plain_name(state_dict.get("own", {}))
        rates = by_plain_name(state_dict.get("rates", {}))
        self._own = {name: own.get(name, c).clone() for name, c in self._common.items()}
        self._rates = {name: float(rate) for name, rate in rates.items()}
