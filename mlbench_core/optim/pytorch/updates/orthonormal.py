"""Orthonormal matrices by polynomials in matrices."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["orthonormalize"]

Polynomials = tuple[tuple[float, float, float], ...]

NEWTON_SCHULZ: Polynomials = ((3.4445, -4.7750, 2.0315),) * 5
POLAR_EXPRESS: Polynomials = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def orthonormalize(matrix: Tensor, polar_express: bool = False) -> Tensor:
    r"""Bring all singular values of a matrix near 1, and keep its singular vectors.

    The matrix is divided by its norm. Then each of five polynomials computes, with
    :math:`A = X X^\top`, :math:`X \leftarrow a X + (b A + c A^2) X`.

    Args:
        matrix: A matrix of floating-point numbers, not empty.
        polar_express: False for Muon's polynomial, five times. It brings singular values of at
            least 0.001 of the norm into [0.47, 1.21]. True for the five of Polar Express, which
            bring those of at least 0.003 of the norm into [0.858, 1.142].

    Returns:
        A new matrix of the same shape. It is bfloat16 for all dtypes but float64, which is kept.
        With zeros alone, it is zero.

    Example:
        >>> diagonal = torch.tensor([4.0, 2.0], dtype=torch.float64).diag()
        >>> (orthonormalize(diagonal, polar_express=True).diag() - 1).abs() < 0.142
        tensor([True, True])

    References:
        K. Jordan et al.: Muon: An optimizer for hidden layers in neural networks,
        kellerjordan.github.io/posts/muon

        N. Amsel, D. Persson, C. Musco, R. M. Gower: The Polar Express. arXiv:2505.16932
    """
    x = matrix
    if matrix.dtype != torch.float64:
        x = matrix.bfloat16()
    # The products below have the size of the number of rows, so the shorter side comes first.
    is_tall = matrix.shape[0] > matrix.shape[1]
    if is_tall:
        x = x.T
    polynomials = NEWTON_SCHULZ
    if polar_express:
        polynomials = POLAR_EXPRESS
        # Room for the rounding of bfloat16: the first polynomial diverges for values above 1.
        x = x / (1.02 * x.norm() + 1e-6)
    else:
        x = x / x.norm().clamp(min=1e-7)
    for a, b, c in polynomials:
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    if is_tall:
        return x.T
    return x
