"""The translation model GNMT, its training, and its decoding."""

from mlbench_core.models.pytorch.gnmt.models import GNMT
from mlbench_core.models.pytorch.gnmt.teacher_forcing import TeacherForcedGNMT
from mlbench_core.models.pytorch.gnmt.translator import Translator

__all__ = ["GNMT", "TeacherForcedGNMT", "Translator"]
