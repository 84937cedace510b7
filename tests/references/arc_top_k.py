"""ARC-Top-K (Chen et al. 2025, arXiv:2510.26709) with the momentum of EF21-SGDM, on one matrix, k
workers in one process."""


def arc_top_k(x, gradient, k, eta, steps, K, draw, beta=1.0):
    """Run ``steps`` steps from x; gradient(i, x, t) is worker i's stochastic gradient, K is the
    number of rows sent, and draw() returns the V of the next step, (columns, r).

    Returns the last iterate, each worker's M_i and G_i, and G."""
    M = [gradient(i, x, 0) for i in range(k)]
    G_i = [M_i.clone() for M_i in M]  # by one all-reduce
    for t in range(steps):
        G = sum(G_i) / k
        x = x - eta * G
        if t + 1 < steps:
            M = [(1 - beta) * M[i] + beta * gradient(i, x, t + 1) for i in range(k)]
            V = draw()
            S = sum((M[i] - G_i[i]) @ V for i in range(k)) / k / V.shape[1] ** 0.5
            rows = S.norm(dim=1).argsort(descending=True)[:K]
            for i in range(k):
                G_i[i][rows] = M[i][rows]
    return x, M, G_i, sum(G_i) / k
