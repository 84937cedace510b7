"""Build sparse graphs of workers for decentralized training."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from mlbench_core.arguments import check_at_least

__all__ = ["Topology", "complete", "exponential", "from_edges", "ring", "torus"]


@dataclass(frozen=True, eq=False)
class Topology:
    r"""A connected undirected graph of workers, and the weights with which neighbors are averaged.

    The mixing matrix :math:`W` has Metropolis-Hastings weights: for an edge between i and j

    .. math:: W_{ij} = \frac{1}{1 + \max(\deg i, \deg j)}, \qquad W_{ii} = 1 - \sum_{j \ne i}
      W_{ij},

    and 0 elsewhere. The matrix is symmetric and doubly stochastic, so the average of all workers
    stays the same. A worker needs only the degrees of its neighbors to compute its weights.

    Attributes:
        name: Name of the graph.
        world_size: Number of workers n.
        edges: The edges ``(i, j)`` with i < j, ascending.

    Raises:
        ValueError: An edge joins a rank with itself or names a rank that does not exist, or the
            graph is not connected.

    References:
        L. Xiao, S. Boyd: Fast linear iterations for distributed averaging. Systems & Control
        Letters 53, 2004. A. Koloskova, S. Stich, M. Jaggi: Decentralized stochastic optimization
        and gossip algorithms with compressed communication, arXiv:1902.00340 (the spectral gap in
        the rate).
    """

    name: str
    world_size: int
    edges: tuple[tuple[int, int], ...]
    _neighbours: tuple[tuple[int, ...], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_at_least("world_size", self.world_size, 1)
        neighbours: list[set[int]] = [set() for _ in range(self.world_size)]
        for i, j in self.edges:
            if i == j or not (0 <= i < self.world_size and 0 <= j < self.world_size):
                raise ValueError(
                    f"edge ({i}, {j}) must join two different ranks from 0 to {self.world_size - 1}"
                )
            neighbours[i].add(j)
            neighbours[j].add(i)
        edges = {(min(edge), max(edge)) for edge in self.edges}
        object.__setattr__(self, "edges", tuple(sorted(edges)))
        sorted_neighbours = tuple(tuple(sorted(ranks)) for ranks in neighbours)
        object.__setattr__(self, "_neighbours", sorted_neighbours)
        # Search from rank 0. Between two parts without an edge, the weights
        # would never approach each other.
        reached, to_visit = {0}, [0]
        while to_visit:
            new = neighbours[to_visit.pop()] - reached
            reached |= new
            to_visit.extend(new)
        apart = set(range(self.world_size)) - reached
        if apart:
            raise ValueError(
                f"ranks {sorted(apart)} cannot be reached from rank 0 over the edges, so their "
                "models would never mix: add edges until the graph is connected"
            )

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that share an edge with ``rank``, ascending.

        Raises:
            ValueError: The graph does not have this rank.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank must be from 0 to {self.world_size - 1}, not {rank}")
        return self._neighbours[rank]

    @property
    def mixing_matrix(self) -> torch.Tensor:
        """Return the weights W: shape (n, n), float64, symmetric, rows and columns sum to 1."""
        weights = torch.zeros(self.world_size, self.world_size, dtype=torch.float64)
        for i, j in self.edges:
            degree = max(len(self._neighbours[i]), len(self._neighbours[j]))
            weights[i, j] = weights[j, i] = 1 / (1 + degree)
        return weights + torch.diag(1 - weights.sum(dim=1))

    @property
    def spectral_gap(self) -> float:
        r"""Return :math:`1 - \max(|\lambda_2|, |\lambda_n|)` of W, in (0, 1].

        It says how fast the workers approach their average. One average with the neighbors
        multiplies the distance to the average of all workers by at most ``1 - spectral_gap``. The
        gap is 1 for the complete graph, which needs one call, and of order :math:`1/n^2` for a
        ring.
        """
        if self.world_size == 1:
            return 1.0
        eigenvalues = torch.linalg.eigvalsh(self.mixing_matrix)  # ascending; the last one is 1
        return float(1 - max(eigenvalues[-2].abs(), eigenvalues[0].abs()))


def ring(world_size: int) -> Topology:
    """Connect every worker with the one before and the one after it.

    Example:
        >>> ring(5).neighbours(0)
        (1, 4)
    """
    return _from_offsets("ring", world_size, (1,))


def torus(world_size: int, rows: int | None = None) -> Topology:
    """Arrange workers in a grid with connected opposite borders, with up to four neighbors each.

    Args:
        world_size: Number of workers. Rank ``r`` is in row ``r // columns`` and column ``r %
            columns``.
        rows: Number of rows, a divisor of ``world_size``; by default the greatest that is at most
            its square root.

    Raises:
        ValueError: ``rows`` does not divide ``world_size``.

    Example:
        >>> torus(9).neighbours(0)
        (1, 2, 3, 6)
    """
    check_at_least("world_size", world_size, 1)
    if rows is None:
        # The grid that is closest to a square has the shortest paths and
        # so the largest spectral gap.
        rows = next(n for n in range(math.isqrt(world_size), 0, -1) if world_size % n == 0)
    if rows < 1 or world_size % rows:
        raise ValueError(f"rows must be a divisor of world_size {world_size}, not {rows}")
    columns = world_size // rows
    edges: set[tuple[int, int]] = set()
    for rank in range(world_size):
        row, column = divmod(rank, columns)
        right = row * columns + (column + 1) % columns
        below = (row + 1) % rows * columns + column
        for other in (right, below):
            # In a single row or column, a worker would be its own neighbor.
            if other != rank:
                edges.add((rank, other))
    return Topology("torus", world_size, tuple(edges))


def exponential(world_size: int) -> Topology:
    """Connect every worker with those 1, 2, 4, 8, ... places before and after it.

    Each worker has about ``2 log2(n)`` neighbors. The spectral gap is of order ``1 / log(n)``.

    Example:
        >>> exponential(8).neighbours(0)
        (1, 2, 4, 6, 7)

    References:
        B. Ying, K. Yuan, Y. Chen, H. Hu, P. Pan, W. Yin: Exponential graph is provably efficient
        for decentralized deep training, arXiv:2110.13363 (there with edges in one direction).
    """
    offsets = [2**k for k in range((world_size - 1).bit_length())]
    return _from_offsets("exponential", world_size, offsets)


def complete(world_size: int) -> Topology:
    """Connect every worker with every other.

    One average with the neighbors is the average of all workers.

    Example:
        >>> round(complete(4).spectral_gap, 12)
        1.0
    """
    return _from_offsets("complete", world_size, range(1, world_size))


def from_edges(world_size: int, edges: Iterable[tuple[int, int]]) -> Topology:
    """Build a graph from its edges.

    Args:
        world_size: Number of workers.
        edges: Pairs of ranks; direction and repetition do not matter.

    Raises:
        ValueError: An edge joins a rank with itself or names a rank that does not exist, or the
            graph is not connected.

    Example:
        >>> from_edges(3, [(0, 1), (1, 2)]).neighbours(1)
        (0, 2)
    """
    return Topology("edges", world_size, tuple((int(i), int(j)) for i, j in edges))


def _from_offsets(name: str, world_size: int, offsets: Iterable[int]) -> Topology:
    edges = []
    for offset in offsets:
        for rank in range(world_size):
            other = (rank + offset) % world_size
            # With few workers, an offset may lead from a worker to itself.
            if other != rank:
                edges.append((rank, other))
    return Topology(name, world_size, tuple(edges))
