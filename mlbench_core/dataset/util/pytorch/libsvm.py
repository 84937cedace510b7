"""The import path of version 3.0 for the conversion of LIBSVM text, and for its command."""

import sys

from mlbench_core.dataset.linearmodels.pytorch import libsvm
from mlbench_core.dataset.linearmodels.pytorch.libsvm import *  # noqa: F403

if __name__ == "__main__":
    raise SystemExit(libsvm.main())

sys.modules[__name__] = libsvm  # the same module, so that a name that is set here is set there
