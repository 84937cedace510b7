"""The leak guards of the other tests hold here too."""

import tensorflow as tf  # noqa: F401 (its import sets environment variables, which no test must do)

from tests.conftest import homes, no_leaks

__all__ = ["homes", "no_leaks"]
