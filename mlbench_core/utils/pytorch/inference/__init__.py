"""Generating sequences: one batched search for translation and language models, and the rules it ranks by."""

from mlbench_core.utils.pytorch.inference.decoding import (
    Constraints,
    DecoderState,
    Hypotheses,
    LogitProposer,
    Proposal,
    Proposer,
    Sampling,
    SearchOptions,
    search,
)
from mlbench_core.utils.pytorch.inference.scores import GNMTScore, LengthPenaltyScore, Score

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
    "search",
]
