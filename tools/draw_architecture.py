"""Draw the packages of the source tree and their imports as an SVG figure.

``python tools/draw_architecture.py`` writes ``docs/explanation/architecture.svg``. Each box is a
package, and an arrow leads from a package to one that it imports. An arrow that follows from two
others is left out, and so are the arrows to the ground floor, which is open to all. The boxes are
filled and their text is white, so the figure is readable on a light and on a dark page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from import_graph import FACES, GROUND, layer, read_imports, read_trees

ROOT = Path(__file__).resolve().parents[1]
FIGURE = ROOT / "docs" / "explanation" / "architecture.svg"

BOX_WIDTH, BOX_HEIGHT, GAP = 134, 38, 22
BEND_WIDTH = 40  # room that an arrow gets in a row that it passes
ROW_HEIGHT, MARGIN = 96, 16
SWEEPS = 12

Edge = tuple[str, str]
Point = tuple[int, int]


def read_packages(root: Path) -> tuple[set[str], set[Edge], list[str]]:
    """Read the packages of a tree.

    Args:
        root: The folder that has ``mlbench_core``, ``mlbench_master``, ``mlbench_cli`` and
            ``benchmarks``.

    Returns:
        The packages above the ground floor, the imports between them, and the public modules of the
        ground floor.
    """
    trees = read_trees(root)
    layers = set(map(layer, trees))
    packages = layers - GROUND - FACES
    edges = set()
    for each in read_imports(trees):
        source, target = each.layers
        if source != target and {source, target} <= packages:
            edges.add((source, target))
    ground = [name for name in layers & GROUND if name and not name.startswith("_")]
    return packages, edges, sorted(ground)


def without_detours(edges: Iterable[Edge]) -> set[Edge]:
    """Return the edges of a graph that no longer path replaces. The graph has no circles."""
    targets: dict[str, set[str]] = defaultdict(set)
    for source, target in edges:
        targets[source].add(target)

    def reachable(start: str) -> set[str]:
        return {start}.union(*map(reachable, targets[start]))

    kept = set()
    # A list, because a look at a node without targets adds it to the dictionary.
    for source, neighbors in list(targets.items()):
        for target in neighbors:
            if target not in set().union(*map(reachable, neighbors - {target})):
                kept.add((source, target))
    return kept


def find_rows(nodes: Iterable[str], edges: set[Edge]) -> dict[str, int]:
    """Give each node the first row below all nodes that import it; row 0 is at the top."""
    sources: dict[str, set[str]] = defaultdict(set)
    for source, target in edges:
        sources[target].add(source)

    def row(node: str) -> int:
        return max((row(source) + 1 for source in sources[node]), default=0)

    return {node: row(node) for node in sorted(nodes)}


def bend(rows: dict[str, int], edges: set[Edge]) -> list[list[str]]:
    """Cut edges into pieces from one row to the next.

    Args:
        rows: Row of each node. A node is added for each row that an edge passes; its name contains
            ``">"``.
        edges: The edges, each from a row to a lower one.

    Returns:
        The nodes along each edge.
    """
    paths = []
    for source, target in sorted(edges):
        path = [source]
        for row in range(rows[source] + 1, rows[target]):
            node = f"{source}>{target}>{row}"
            rows[node] = row
            path.append(node)
        paths.append([*path, target])
    return paths


def place(rows: dict[str, int], paths: list[list[str]]) -> dict[str, int]:
    """Choose the horizontal center of each node, so that arrows cross little and are steep.

    Each sweep moves the nodes of a row towards the middle of their neighbors, in their new order.
    Positions are integers, so that every version of Python draws the same figure."""
    neighbors: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        for upper, lower in pairwise(path):
            neighbors[upper].append(lower)
            neighbors[lower].append(upper)
    by_row: list[list[str]] = [[] for _ in range(max(rows.values()) + 1)]
    for node in sorted(rows):
        by_row[rows[node]].append(node)
    x = dict.fromkeys(rows, 0)
    for nodes in by_row:
        x.update(zip(nodes, spread(nodes, [0] * len(nodes)), strict=True))
    for sweep in range(SWEEPS):
        for nodes in by_row if sweep % 2 else reversed(by_row):
            # The middle of the neighbors, or the node's own position if it has none.
            wanted = {}
            for node in nodes:
                wanted[node] = mean([x[other] for other in neighbors[node] or [node]])
            nodes.sort(key=lambda node, wanted=wanted: (wanted[node], node))  # type: ignore[misc]
            positions = spread(nodes, [wanted[node] for node in nodes])
            x.update(zip(nodes, positions, strict=True))
    return x


def spread(nodes: list[str], wanted: list[int]) -> list[int]:
    """Return positions near those wanted, in the same order and without overlap."""
    halves = []
    for node in nodes:
        width = BEND_WIDTH if ">" in node else BOX_WIDTH + GAP
        halves.append(width // 2)
    from_left = wanted[:1]
    for i in range(1, len(wanted)):
        from_left.append(max(wanted[i], from_left[-1] + halves[i - 1] + halves[i]))
    from_right = wanted[-1:]
    for i in range(len(wanted) - 2, -1, -1):
        from_right.insert(0, min(wanted[i], from_right[0] - halves[i] - halves[i + 1]))
    return [(left + right) // 2 for left, right in zip(from_left, from_right, strict=True)]


def mean(values: list[int]) -> int:
    """Return the mean, rounded down."""
    return sum(values) // len(values)


def curve(points: list[Point]) -> str:
    """Return the commands of a smooth SVG path that leaves and reaches each point vertically."""
    commands = [f"M{points[0][0]} {points[0][1]}"]
    for (x0, y0), (x1, y1) in pairwise(points):
        middle = (y0 + y1) // 2
        commands.append(f"C{x0} {middle} {x1} {middle} {x1} {y1}")
    return " ".join(commands)


def draw(root: Path = ROOT) -> str:
    """Draw the figure of a tree.

    Args:
        root: The folder that has ``mlbench_core``, ``mlbench_master``, ``mlbench_cli`` and
            ``benchmarks``.

    Returns:
        The SVG text.
    """
    packages, imports, ground = read_packages(root)
    edges = without_detours(imports)
    rows = find_rows(packages, edges)
    paths = bend(rows, edges)
    x = place(rows, paths)
    centers = [x[node] for node in packages]
    left = min(centers) - BOX_WIDTH // 2 - MARGIN
    width = max(centers) + BOX_WIDTH // 2 + MARGIN - left
    ground_y = MARGIN + (max(rows.values()) + 1) * ROW_HEIGHT
    height = ground_y + BOX_HEIGHT + MARGIN

    def point(node: str, side: int) -> Point:
        """Return where an arrow meets a node: above (-1), in the center (0) or below (1)."""
        return x[node] - left, MARGIN + rows[node] * ROW_HEIGHT + (1 + side) * BOX_HEIGHT // 2

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="14" text-anchor="middle">',
        "<title>The packages of MLBench and their imports</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 Z" fill="#8a94a0"/></marker></defs>',
        '<g fill="none" stroke="#8a94a0" stroke-width="1.5" marker-end="url(#tip)">',
    ]
    for path in paths:
        points = [point(node, 0) for node in path]
        points[0], points[-1] = point(path[0], 1), point(path[-1], -1)
        title = f"{path[0]} imports {path[-1]}"
        lines.append(f'<path d="{curve(points)}"><title>{title}</title></path>')
    lines.append("</g>")
    for node in sorted(packages):
        lines += box(node, *point(node, -1), BOX_WIDTH, "#2f6690")
    title = "ground floor: " + ", ".join(ground)
    lines += box(title, width // 2, ground_y, width - 2 * MARGIN, "#5b6570")
    return "\n".join([*lines, "</svg>", ""])


def box(text: str, center: int, top: int, width: int, color: str) -> list[str]:
    """Return the elements of a box with white text."""
    return [
        (
            f'<rect x="{center - width // 2}" y="{top}" width="{width}" height="{BOX_HEIGHT}" '
            f'rx="6" fill="{color}"/>'
        ),
        f'<text x="{center}" y="{top + BOX_HEIGHT // 2 + 5}" fill="#ffffff">{text}</text>',
    ]


if __name__ == "__main__":
    FIGURE.write_text(draw())
