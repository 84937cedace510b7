"""Constants of the WMT16 vocabulary, under the names that scripts of version 3.0 use."""

__all__ = [
    "BOS",
    "BOS_TOKEN",
    "BPE_CODES",
    "EOS",
    "EOS_TOKEN",
    "PAD",
    "PAD_TOKEN",
    "UNK",
    "UNK_TOKEN",
    "VOCAB_FNAME",
]

PAD_TOKEN, UNK_TOKEN, BOS_TOKEN, EOS_TOKEN = "<pad>", "<unk>", "<s>", "</s>"
"""Symbols of padding, unknown, and beginning and end of a sentence."""

PAD, UNK, BOS, EOS = range(4)
"""Ids of these symbols."""

BPE_CODES = "bpe.32000"
"""File of the merges."""

VOCAB_FNAME = "vocab.bpe.32000"
"""File of the symbols."""
