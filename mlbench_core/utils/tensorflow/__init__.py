"""The import path of version 3.0 for :mod:`mlbench_core.distributed.tensorflow.settings`."""

from mlbench_core._optional import _tensorflow as _tensorflow
from mlbench_core.distributed.tensorflow.settings import default_session_config

__all__ = ["default_session_config"]
