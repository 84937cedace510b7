"""Predict the time of a step and the time to a goal, on other networks and with other workers."""

from __future__ import annotations

from mlbench_core.prediction.check import Check, check_repeats, why_unchecked, widened
from mlbench_core.prediction.costs import Collective, collective_s
from mlbench_core.prediction.repeats import predict_repeats
from mlbench_core.prediction.time_model import Prediction, predict, predict_time_to_goal

__all__ = [
    "Check",
    "Collective",
    "Prediction",
    "check_repeats",
    "collective_s",
    "predict",
    "predict_repeats",
    "predict_time_to_goal",
    "why_unchecked",
    "widened",
]
