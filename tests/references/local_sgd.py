"""Local SGD (Stich 2018, arXiv:1805.09767), delayed by tau steps (DaSGD, Zhou et al. 2020,
arXiv:2006.00441).

k workers in one process.
"""


def local_sgd(x, gradient, eta, H, steps, tau=0):
    """Run ``steps`` steps; x[i] is worker i's tensor, gradient(i, x_i, t) its stochastic
    gradient."""
    k = len(x)
    arriving = {}
    for t in range(1, steps + 1):
        x = [x[i] - eta * gradient(i, x[i], t - 1) for i in range(k)]
        if t % H == 0:
            average = sum(x) / k
            arriving[t + tau] = [average - x[i] for i in range(k)]
        if t in arriving:
            x = [x[i] + arriving[t][i] for i in range(k)]
    return x
