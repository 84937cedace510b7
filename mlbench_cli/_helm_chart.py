"""Find the Helm chart of the master."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from mlbench_core.errors import ConfigurationError

__all__ = ["chart_folder"]


def chart_folder() -> Path:
    """Return the absolute path of the folder with the Helm chart.

    Raises:
        ConfigurationError: The chart is not installed.
    """
    found = importlib.util.find_spec("mlbench_charts")
    roots = [Path(root) for root in (found.submodule_search_locations or ())] if found else []
    # In a checkout, the chart is in the folder charts beside the library, even if it is not installed.
    roots.append(Path(__file__).resolve().parents[2] / "charts")
    for root in roots:
        folder = root / "mlbench"
        if (folder / "Chart.yaml").is_file():
            return folder.resolve()
    raise ConfigurationError(
        f"the Helm chart is missing: no mlbench/Chart.yaml below {', '.join(map(str, roots))}; "
        "reinstall mlbench-core or run from a checkout"
    )
