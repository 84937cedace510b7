"""Define the library's exceptions as one tree.

Every error from outside the process (a network, a file, another process, a missing package)
derives from :class:`MLBenchError`. A wrong argument is a plain :class:`ValueError` or
:class:`TypeError`.

.. code-block:: text

    MLBenchError
    +-- ConfigurationError        the run was set up in a way that cannot work
    |   +-- BackendError          a communication backend is unknown or not available here
    |   +-- MasterAddressError    the given address of the master is not valid (also a ValueError)
    |   +-- MasterTokenError      the token of the master cannot be sent (also a ValueError)
    |   +-- MissingDependencyError  an optional package is not installed (also an ImportError)
    +-- MasterError               the communication with the master failed
    |   +-- MasterNotFoundError   no master could be located (also a ValueError)
    |   +-- MasterRequestError    the master refused a request or answered with an error
    +-- CheckpointError           a checkpoint is missing, damaged or does not fit
    |   +-- CheckpointNotFoundError  the checkpoint does not exist (also a FileNotFoundError)
    +-- DatasetError              data on disk is missing or damaged
    |   +-- DatasetNotFoundError  a folder or file does not exist (also a FileNotFoundError)
    |   +-- DownloadError         a download failed or its checksum is wrong
    +-- WorkerError               another worker was lost (also a RuntimeError)
"""

from __future__ import annotations

__all__ = [
    "BackendError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "ConfigurationError",
    "DatasetError",
    "DatasetNotFoundError",
    "DownloadError",
    "MLBenchError",
    "MasterAddressError",
    "MasterError",
    "MasterNotFoundError",
    "MasterRequestError",
    "MasterTokenError",
    "MissingDependencyError",
    "WorkerError",
    "require",
]


class MLBenchError(Exception):
    """Base class of every error that this library raises for a cause outside the process."""


class ConfigurationError(MLBenchError):
    """The run was set up in a way that cannot work on this machine."""


class BackendError(ConfigurationError):
    """A communication backend is unknown or cannot be used here."""


class MasterAddressError(ConfigurationError, ValueError):
    """The given address of the master is not valid."""


class MasterTokenError(ConfigurationError, ValueError):
    """The token of the master has characters that a request cannot carry."""


class MissingDependencyError(ConfigurationError, ImportError):
    """An optional package is not installed; the message has the ``pip install`` line for it."""


class MasterError(MLBenchError):
    """An error of the communication with the master."""


class MasterNotFoundError(MasterError, ValueError):
    """No master could be located. The error is also a ``ValueError``, as in version 3.0."""


class MasterRequestError(MasterError):
    """The master refused a request.

    Args:
        message: The reason, in one line.
        status: HTTP status code of the answer; None if the master did not answer.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class CheckpointError(MLBenchError):
    """A checkpoint is missing, damaged or does not fit the model."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """The checkpoint to load does not exist."""


class DatasetError(MLBenchError):
    """Data on disk is missing or damaged."""


class DatasetNotFoundError(DatasetError, FileNotFoundError):
    """The folder or file of a data set does not exist."""


class DownloadError(DatasetError):
    """A download failed, or the downloaded file has the wrong checksum."""


class WorkerError(MLBenchError, RuntimeError):
    """Another worker of the run was lost.

    It is also a ``RuntimeError``, like the error that torch raises. So scripts that catch torch's
    error catch this one.
    """


def require(module: str, extra: str) -> object:
    """Import an optional module, or raise an error with the command that installs it.

    Args:
        module: Dotted name of the module, for example ``"sacrebleu"``.
        extra: The extra of mlbench-core that installs it, for example ``"text"``.

    Returns:
        The imported module.

    Raises:
        MissingDependencyError: The package is not installed.

    Example:
        >>> require("json", "text").__name__
        'json'
    """
    import importlib

    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # If the package is installed but lacks a module that it imports itself, installing the
        # extra would not help.
        if error.name is None or not (module == error.name or module.startswith(error.name + ".")):
            raise
        raise MissingDependencyError(
            f"this needs the package '{error.name}', which is not installed: "
            f"pip install 'mlbench-core[{extra}]'"
        ) from error
