"""SGD whose workers send compressed differences to a few neighbors (CHOCO-SGD)."""

from __future__ import annotations

from mlbench_core.aggregation.pytorch.choco import ChocoAggregation
from mlbench_core.optim.pytorch.decentralized import GossipOptimizer

__all__ = ["ChocoSGD"]


class ChocoSGD(GossipOptimizer):
    r"""SGD on every worker, then an average with the neighbors by compressed differences.

    With :math:`x_i` the weights after the local step, public copies :math:`\hat x_i`, a compression
    :math:`Q`, the mixing matrix :math:`W` and the consensus step size :math:`\gamma`,

    .. math::

        q_i &= Q(x_i - \hat x_i) \\
        \hat x_j &\leftarrow \hat x_j + q_j \\
        x_i &\leftarrow x_i + \gamma \sum_j W_{ij} (\hat x_j - \hat x_i).

    Each worker has its own momentum. See
    :class:`~mlbench_core.aggregation.pytorch.choco.ChocoAggregation` for the compressions and the
    bytes.

    Args:
        aggregation: The exchange with all its settings. None sends the largest tenth of each
            difference, with :math:`\gamma = 0.2`.

    Other arguments and errors: see
    :class:`~mlbench_core.optim.pytorch.decentralized.DecentralizedSGD`.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> exchange = ChocoAggregation(neighbors=[], compression="sign", gamma=0.4)
        >>> optimizer = ChocoSGD(model=model, lr=0.1, aggregation=exchange)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()

    References:
        A. Koloskova, S. Stich, M. Jaggi: Decentralized Stochastic Optimization and Gossip
        Algorithms with Compressed Communication. arXiv:1902.00340

        A. Koloskova, T. Lin, S. Stich, M. Jaggi: Decentralized Deep Learning with Arbitrary
        Communication Compression. arXiv:1907.09356
    """

    _kind = ChocoAggregation
