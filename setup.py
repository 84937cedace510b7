"""What pyproject.toml cannot say: ``benchmarks/`` travels in the wheel as the package ``mlbench_benchmarks``.

The reference implementations are scripts for people to read and copy, so they stand beside the library in the
source tree; ``mlbench run --task`` finds them in an installed wheel under this name.
"""

from pathlib import Path

from setuptools import find_packages, setup

tasks = sorted(path.parent.name for path in Path(__file__).parent.glob("benchmarks/*/*.py"))

setup(
    packages=[
        *find_packages(include=["mlbench_core*", "mlbench_master*"]),
        "mlbench_benchmarks",
        *(f"mlbench_benchmarks.{name}" for name in dict.fromkeys(tasks)),
    ],
    package_dir={"mlbench_benchmarks": "benchmarks"},
    package_data={
        "mlbench_core": ["py.typed"],
        "mlbench_master": ["py.typed", "static/*", "templates/*"],
        "": ["README.md", "Dockerfile"],
    },
)
