"""Import torch for a ``pytorch`` package, or raise an error that names the extra that installs it.

The ``__init__`` of each ``pytorch`` package imports this module before all others of the library.
Without torch, the import then ends with a :class:`~mlbench_core.errors.MissingDependencyError` that
has the ``pip install`` line.
"""

from mlbench_core.errors import require

require("torch", "torch")
