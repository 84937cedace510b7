"""Local SGD (Stich 2018, arXiv:1805.09767), k workers in one process."""


def local_sgd(x, gradient, eta, H, steps):
    """Run ``steps`` steps; x[i] is worker i's tensor, gradient(i, x_i, t) its stochastic gradient."""
    k = len(x)
    for t in range(steps):
        x = [x[i] - eta * gradient(i, x[i], t) for i in range(k)]
        if (t + 1) % H == 0:
            x = [sum(x) / k] * k
    return x
