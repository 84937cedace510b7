"""Import TensorFlow for a ``tensorflow`` package, or raise an error that names the extra.

The ``__init__`` of each ``tensorflow`` package imports this module before all others of the
library. Without TensorFlow, the import then ends with a
:class:`~mlbench_core.errors.MissingDependencyError` that has the ``pip install`` line.
"""

from mlbench_core.errors import require

require("tensorflow", "tensorflow")
