"""Reference data sets."""

from mlbench_core._optional.lazy import lazy_subpackages

__getattr__ = lazy_subpackages(
    __name__,
    "download",
    "imagerecognition",
    "libsvm_names",
    "linearmodels",
    "local_files",
    "nlp",
    "parts",
    "preparation",
    "pytorch",
    "registry",
    "util",
    "verification",
)
