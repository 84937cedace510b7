"""Define the three parts of the build that pyproject.toml cannot describe.

* The wheel contains ``benchmarks/`` as the package ``mlbench_benchmarks``. The reference
  implementations are scripts to read and copy, so their folder is outside of the library in the
  source tree. ``mlbench run --task`` finds them in an installed wheel under this name.
* In the same way, it contains ``helm/``, the Helm chart, as the package ``mlbench_helm``.
* With ``MLBENCH_CUDA=1`` an installation or a wheel compiles ``csrc/`` and contains the library.
  Without it, nothing is compiled, and the wheel is for every platform. It has the sources as the
  package ``mlbench_csrc``, for ``python -m mlbench_core.install_cuda_extensions``.
"""

import os
import sys
from pathlib import Path

from setuptools import Command, Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

ROOT = Path(__file__).resolve().parent
LIBRARY = "mlbench_core/ops/pytorch/lib/libmlbench_cuda.so"
WITH_CUDA = os.environ.get("MLBENCH_CUDA") == "1"


class BuildCuda(Command):
    """Compile ``csrc/`` into the folder of the operators, see docs/howto/cuda.md."""

    description = "compile the CUDA extension"
    user_options: list = [("build-lib=", "b", "folder of the built package")]  # noqa: RUF012

    def initialize_options(self) -> None:
        self.build_lib = None
        self.editable_mode = False

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self) -> None:
        sys.path.insert(0, str(ROOT))
        from csrc.build import BuildError
        from csrc.build import build as build_library

        try:
            folder = ROOT if self.editable_mode else Path(self.build_lib)
            sys.stdout.write(f"{build_library(folder / LIBRARY)}\n")
        except BuildError as error:
            # Not an error of setuptools, which pip would show with a traceback.
            raise SystemExit(f"error: {error}") from None

    def get_source_files(self) -> list:
        return [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("csrc/*/*.cu*"))]

    def get_outputs(self) -> list:
        return [str(Path(self.build_lib) / LIBRARY)]

    def get_output_mapping(self) -> dict:
        return dict.fromkeys(self.get_outputs(), LIBRARY) if self.editable_mode else {}


class Build(build):
    """The usual build, with the CUDA extension if it is requested."""

    sub_commands = [("build_cuda", lambda self: WITH_CUDA), *build.sub_commands]  # noqa: RUF012


class BdistWheel(bdist_wheel):
    """A wheel for every Python: the CUDA extension does not link to it."""

    def get_tag(self) -> tuple:
        return "py3", "none", super().get_tag()[2]


class MLBenchDistribution(Distribution):
    """A distribution for one platform if it contains the CUDA extension."""

    def has_ext_modules(self) -> bool:
        return WITH_CUDA or super().has_ext_modules()


# Experiments are made with a checkout, whose state their results name.
tasks = sorted({path.parent.name for path in ROOT.glob("benchmarks/*/*.py")} - {"experiments"})

setup(
    distclass=MLBenchDistribution,
    cmdclass={"bdist_wheel": BdistWheel, "build": Build, "build_cuda": BuildCuda},
    packages=[
        *find_packages(include=["mlbench_core*", "mlbench_master*", "mlbench_cli*"]),
        "mlbench_benchmarks",
        "mlbench_csrc",
        *(f"mlbench_benchmarks.{name}" for name in tasks),
        # Container images are built from a part of the source tree, without the chart.
        *(["mlbench_helm"] if (ROOT / "helm").is_dir() else []),
    ],
    package_dir={
        "mlbench_benchmarks": "benchmarks",
        "mlbench_helm": "helm",
        "mlbench_csrc": "csrc",
    },
    package_data={
        "mlbench_cli": ["py.typed"],
        "mlbench_core": ["py.typed"],
        "mlbench_core.comparison": ["*.css", "*.mplstyle", "*.toml", "references/*.json"],
        "mlbench_core.results": ["*.json"],
        "mlbench_csrc": ["*/*.cu", "*/*.cuh"],
        "mlbench_helm": ["mlbench/*", "mlbench/.helmignore", "mlbench/templates/*"],
        "mlbench_master": ["py.typed"],
        "mlbench_master.web": ["static/*", "static/vendor/*", "templates/*"],
        "": ["README.md"],
    },
)
