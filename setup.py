"""Define the two parts of the build that pyproject.toml cannot describe.

* The wheel contains ``benchmarks/`` as the package ``mlbench_benchmarks``. The reference
  implementations are scripts to read and copy, so their folder is outside of the library in the
  source tree. ``mlbench run --task`` finds them in an installed wheel under this name.
* In the same way, it contains ``helm/``, the Helm chart, as the package ``mlbench_helm``.
"""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent

# Experiments are made with a checkout, whose state their results name.
tasks = sorted({path.parent.name for path in ROOT.glob("benchmarks/*/*.py")} - {"experiments"})

setup(
    packages=[
        *find_packages(include=["mlbench_core*", "mlbench_master*", "mlbench_cli*"]),
        "mlbench_benchmarks",
        *(f"mlbench_benchmarks.{name}" for name in tasks),
        # Container images are built from a part of the source tree, without the chart.
        *(["mlbench_helm"] if (ROOT / "helm").is_dir() else []),
    ],
    package_dir={"mlbench_benchmarks": "benchmarks", "mlbench_helm": "helm"},
    package_data={
        "mlbench_cli": ["py.typed"],
        "mlbench_core": ["py.typed"],
        "mlbench_core.comparison": ["*.mplstyle", "*.toml", "references/*.json"],
        "mlbench_core.results": ["*.json"],
        "mlbench_core.sweep": ["*.css"],
        "mlbench_helm": ["mlbench/*", "mlbench/.helmignore", "mlbench/templates/*"],
        "mlbench_master": ["py.typed"],
        "mlbench_master.web": ["static/*", "static/vendor/*", "templates/*"],
        "": ["README.md"],
    },
)
