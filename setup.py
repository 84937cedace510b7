"""Define the three parts of the build that pyproject.toml cannot describe.

* The wheel contains ``benchmarks/`` as the package ``mlbench_benchmarks``. The reference implementations are scripts to
  read and copy, so their folder is outside of the library in the source tree. ``mlbench run --task`` finds them in an
  installed wheel under this name.
* In the same way, it contains ``charts/``, the Helm chart, as the package ``mlbench_charts``.
* ``python setup.py build_cuda`` compiles ``csrc/``. With ``MLBENCH_CUDA=1`` an installation or a wheel does so too and
  contains the result. Without it, nothing is compiled, and the wheel is for every platform (docs/howto/cuda.md).
"""

import os
import shutil
import sys
from pathlib import Path

from setuptools import Command, Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

ROOT = Path(__file__).resolve().parent
LIBRARY = "mlbench_core/ops/pytorch/lib/libmlbench_cuda.so"


def with_cuda() -> bool:
    """Return whether this installation or wheel compiles the CUDA extension."""
    value = os.environ.get("MLBENCH_CUDA", "")
    if value not in ("", "0", "1"):
        raise SystemExit(f"error: MLBENCH_CUDA is {value!r}: 1 compiles the CUDA extension, 0 or nothing does not")
    return value == "1"


class BuildCuda(Command):
    """Compile ``csrc/`` into the library in the operators' folder, and copy it into the wheel or installation."""

    description = "compile the CUDA extension (needs nvcc and torch; docs/howto/cuda.md)"
    user_options: list = []  # noqa: RUF012 (the form that setuptools asks for)

    def initialize_options(self) -> None:
        self.build_lib = None
        self.editable_mode = False

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self) -> None:
        sys.path.insert(0, str(ROOT))
        from csrc.build import BuildError
        from csrc.build import build as build_extension

        try:
            built = build_extension(ROOT)
        except BuildError as error:
            # Not one of setuptools' errors, before which an editable installation would print a traceback.
            raise SystemExit(f"error: {error}") from None
        if with_cuda() and not self.editable_mode:
            target = ROOT / self.build_lib / LIBRARY
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(built.library, target)

    def get_source_files(self) -> list:
        files = (path for path in (ROOT / "csrc").rglob("*") if path.is_file() and path.suffix != ".pyc")
        return sorted(str(path.relative_to(ROOT)) for path in files)

    def get_outputs(self) -> list:
        return [str(Path(self.build_lib) / LIBRARY)]

    def get_output_mapping(self) -> dict:
        return dict.fromkeys(self.get_outputs(), LIBRARY) if self.editable_mode else {}


class Build(build):
    """The usual build, with the CUDA extension first if it is requested."""

    sub_commands = [("build_cuda", lambda self: with_cuda()), *build.sub_commands]  # noqa: RUF012


class BdistWheel(bdist_wheel):
    """A wheel whose tag never names a Python version, because the CUDA extension does not link to Python."""

    def get_tag(self) -> tuple:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


class MLBenchDistribution(Distribution):
    """A distribution that is for one platform if it contains the CUDA extension."""

    def has_ext_modules(self) -> bool:
        return with_cuda() or super().has_ext_modules()


# Experiments are made with a checkout, whose state their results name.
tasks = sorted({path.parent.name for path in ROOT.glob("benchmarks/*/*.py")} - {"experiments"})

setup(
    distclass=MLBenchDistribution,
    cmdclass={"bdist_wheel": BdistWheel, "build": Build, "build_cuda": BuildCuda},
    packages=[
        *find_packages(include=["mlbench_core*", "mlbench_master*"]),
        "mlbench_benchmarks",
        *(f"mlbench_benchmarks.{name}" for name in tasks),
        # Container images are built from a part of the source tree, without the chart.
        *(["mlbench_charts"] if (ROOT / "charts").is_dir() else []),
    ],
    package_dir={"mlbench_benchmarks": "benchmarks", "mlbench_charts": "charts"},
    package_data={
        "mlbench_core": ["py.typed"],
        "mlbench_core.results": ["*.json", "*.mplstyle", "*.toml", "references/*.json"],
        "mlbench_core.sweep": ["*.css"],
        "mlbench_charts": ["mlbench/*", "mlbench/.helmignore", "mlbench/templates/*"],
        "mlbench_master": ["py.typed", "static/*", "static/vendor/*", "templates/*"],
        "": ["README.md"],
    },
)
