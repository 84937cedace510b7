"""DES-LOC (Iacob et al. 2025, arXiv:2505.22549) on one tensor, k workers in one process."""


def des_loc(x, gradient, k, eta, steps, Kx, Ku, Kv, betas=(0.9, 0.999), eps=1e-8):
    """Run ``steps`` steps from x; gradient(i, x_i, t) is worker i's stochastic gradient.

    Returns the workers' weights, first moments and second moments."""
    x = [x.clone() for _ in range(k)]
    u, v = [0 * x_i for x_i in x], [0 * x_i for x_i in x]
    # The largest |u| / sqrt(v) of any gradients, which decay by betas[0] / betas[1] into the past.
    series = sum((betas[0] ** 2 / betas[1]) ** t for t in range(1000))
    largest = (1 - betas[0]) * (series / (1 - betas[1])) ** 0.5
    for t in range(1, steps + 1):
        for i in range(k):
            g = gradient(i, x[i], t - 1)
            u[i] = betas[0] * u[i] + (1 - betas[0]) * g
            v[i] = betas[1] * v[i] + (1 - betas[1]) * g**2
            direction = u[i] / (1 - betas[0] ** t)
            scale = (v[i] / (1 - betas[1] ** t)) ** 0.5 + eps
            x[i] = x[i] - eta * direction / scale
        for values, period in ((x, Kx), (u, Ku), (v, Kv)):
            if t % period == 0:
                values[:] = [sum(values) / k] * k
        if t % Ku == 0 and t % Kv != 0:  # ours: no averaged u is above what gradients can make
            limits = [largest * v_i**0.5 for v_i in v]
            u = [u_i.clamp(-limit, limit) for u_i, limit in zip(u, limits, strict=True)]
    return x, u, v
