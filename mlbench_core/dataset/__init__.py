"""Reference data sets."""

from mlbench_core._lazy import lazy_subpackages

__getattr__ = lazy_subpackages(
    __name__, "download", "imagerecognition", "linearmodels", "local_files", "nlp", "pytorch", "util"
)
