"""The leak guards of the other tests hold here too."""

from tests.conftest import homes, no_leaks

__all__ = ["homes", "no_leaks"]
