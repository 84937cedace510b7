"""GNMT for translation, and its decoding."""

from mlbench_core.models.pytorch.gnmt.models import GNMT
from mlbench_core.models.pytorch.gnmt.translator import Translator

__all__ = ["GNMT", "Translator"]
