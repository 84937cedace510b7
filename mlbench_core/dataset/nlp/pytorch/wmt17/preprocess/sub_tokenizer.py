"""The import path of version 3.0 for the vocabulary of the Transformer.

The arguments are those of this version.
"""

from mlbench_core.dataset.nlp.pytorch.subtoken_vocabulary import SubtokenVocabulary as Subtokenizer

__all__ = ["Subtokenizer"]
