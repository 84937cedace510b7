"""Find workers whose change of the weights is unusually long, and weigh the others (EDiT)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mlbench_core.aggregation.pytorch.transport.names import copies_by_plain_name
from mlbench_core.arguments import check_at_least, check_int

__all__ = ["OutlierPenalty"]

_FEED = 0.02  # weight of a new norm in the moving averages
_THRESHOLD = 3.0


class OutlierPenalty:
    r"""Give the workers weights by the norms of their changes, tensor by tensor (EDiT).

    Let :math:`\Delta_i = \theta - \theta_i` be the change of a tensor by worker :math:`i`, and
    :math:`n_i` its norm. Each worker keeps moving averages of its own norms, both 0 at first, and
    the deviation :math:`z`:

    .. math::
        z &= (n_i - \text{mean}) / \sqrt{M_2} \\
        \delta &= n_i - \text{mean}, \quad \text{mean} \leftarrow \text{mean} + 0.02\, \delta \\
        M_2 &\leftarrow 0.98\, (M_2 + 0.02\, \delta\, (n_i - \text{mean})).

    After the first rounds, a worker is an outlier if :math:`z > 3 \max(1, s)`, with :math:`s` the
    standard deviation of the last values of :math:`z`. An outlier is not fed to the averages. The
    outer gradient is :math:`\sum_i w_i \Delta_i`. The weights :math:`w_i` are the softmax of
    :math:`-n_i` over the other workers, and 0 for outliers. So the norms must not be large: with
    norms that differ by 10, one worker has nearly all the weight. The norm of all outer gradients
    of a call together is clipped. If all workers are outliers, a tensor takes no outer step.

    A change that is not finite makes the outer gradient nan on all workers, so that every worker
    sees the overflow. It is not fed, nor is a norm of 0, as of a frozen layer. :math:`z` is 0 while
    :math:`M_2` is 0.

    Args:
        first_rounds: Number of a tensor's first rounds in which no finite norm is an outlier, and
            number of the values of :math:`z` that are kept.
        largest_norm: Norm to which the outer gradients of a call are clipped.

    Raises:
        TypeError: ``first_rounds`` is not an integer.
        ValueError: ``first_rounds`` is less than 2, or ``largest_norm`` is negative.

    References:
        Cheng, Gao, Yue, Ye, Jiang and Sha: EDiT: A Local-SGD-Based Efficient Distributed Training
        Method for Large Language Models. arXiv:2412.07210
    """

    def __init__(self, first_rounds: int = 120, largest_norm: float = 10.0) -> None:
        self.first_rounds = check_int("first_rounds", first_rounds, least=2)
        check_at_least("largest_norm", largest_norm, 0)
        self.largest_norm = largest_norm
        # By name, in float64: mean, M2, and then the last values of z.
        self._norms: dict[str, Tensor] = {}

    def own_norms(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return the norm of each tensor in float32 on the CPU.

        It is infinity for an outlier, and nan for a tensor that is not finite.
        """
        found = []
        for name, gradient in gradients.items():
            dtype = torch.promote_types(gradient.dtype, torch.float32)
            norm = float(torch.linalg.vector_norm(gradient, dtype=dtype))
            if not math.isfinite(norm):
                norm = math.nan
            elif self._is_outlier(name, norm):
                norm = math.inf
            found.append(norm)
        return torch.tensor(found, dtype=torch.float32)

    def weights(self, norms: Tensor) -> Tensor:
        """Return the weights of all workers, shape (k, T), for their norms; outliers get 0."""
        # If all workers are outliers, the softmax of -infinity is nan.
        return torch.softmax(-norms.double(), dim=0).masked_fill_(norms.isposinf().all(dim=0), 0)

    def clip_(self, gradients: Sequence[Tensor]) -> None:
        """Scale tensors in place, so that their common norm is at most the largest norm."""
        norm = torch.nn.utils.get_total_norm(gradients)
        factor = (self.largest_norm / norm.clamp(min=1e-30)).clamp(max=1)
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.device))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the moving averages by parameter name."""
        return dict(self._norms)

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Restore the result of :meth:`state_dict`; an empty state starts from zero."""
        self._norms = copies_by_plain_name(state_dict)

    def _is_outlier(self, name: str, norm: float) -> bool:
        """Compare a norm with those before, and feed it to the averages if it is not an outlier."""
        state = self._norms.get(name, torch.zeros(2, dtype=torch.float64))
        mean, square = state[:2].tolist()
        z = 0.0
        if square > 0:
            z = (norm - mean) / math.sqrt(square)
        kept = state[2:]
        if len(kept) == self.first_rounds and z > _THRESHOLD * max(1.0, float(kept.std())):
            return True
        if norm > 0:
            delta = norm - mean
            mean += _FEED * delta
            square = (1 - _FEED) * (square + _FEED * delta * (norm - mean))
            kept = torch.cat([kept, kept.new_tensor([z])])[-self.first_rounds :]
            self._norms[name] = torch.cat([kept.new_tensor([mean, square]), kept])
        return False
