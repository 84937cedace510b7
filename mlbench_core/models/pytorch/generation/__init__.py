"""Sequence generation: a batched search for all models, and the scores that rank its results."""

from mlbench_core.models.pytorch.generation.decoding import Hypotheses, SearchOptions, search
from mlbench_core.models.pytorch.generation.proposals import (
    Constraints,
    DecoderState,
    LogitProposer,
    Proposal,
    Proposer,
    Sampling,
    keep_forced,
)
from mlbench_core.models.pytorch.generation.scores import GNMTScore, LengthPenaltyScore, Score

__all__ = [
    "Constraints",
    "DecoderState",
    "GNMTScore",
    "Hypotheses",
    "LengthPenaltyScore",
    "LogitProposer",
    "Proposal",
    "Proposer",
    "Sampling",
    "Score",
    "SearchOptions",
    "keep_forced",
    "search",
]
