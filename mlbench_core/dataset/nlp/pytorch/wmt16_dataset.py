"""WMT16, English-German: the data of task 4a."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from mlbench_core.dataset.nlp.pytorch.pair_datasets import RecurrentPairs
from mlbench_core.dataset.nlp.pytorch.pair_part import (
    choose_part,
    download_files,
    find_files,
    load_part,
)
from mlbench_core.dataset.nlp.pytorch.pair_text import PairFiles, Recipe
from mlbench_core.dataset.nlp.pytorch.wmt16.wmt16_tokenizer import WMT16Tokenizer
from mlbench_core.dataset.registry import WMT16_ARCHIVES
from mlbench_core.errors import DatasetError

__all__ = ["WMT16Dataset", "download_text"]

_NAMES = {"train": ("train",), "validation": ("newstest2014", "validation", "val")}
_DIVIDED_NAMES = {
    "train": ("train.tok.clean.bpe.32000",),
    "validation": ("newstest2014.tok.bpe.32000", "newstest2014.tok.clean.bpe.32000"),
}


class WMT16Dataset(RecurrentPairs):
    """One part of WMT16 English-German.

    The training text is Europarl 7, Common Crawl and News Commentary 11; newstest2014 is for
    validation.

    The text is cleaned and split into words. The words are split into sub-words with a vocabulary
    of both languages. If ``root`` has a vocabulary (``vocab.bpe.32000`` and ``bpe.32000``), it is
    used. Otherwise a vocabulary of 32,000 merges is learned from the training text. The result is
    stored, and later runs map it into memory. A training pair is left out if one of its sentences
    has no words, more than 80 words, or more than 9 times as many words as the other one.

    To use your own text, put ``train.en`` and ``train.de`` into ``root``, plain or compressed, and
    also ``newstest2014.en`` and ``newstest2014.de`` (or ``validation.en`` and ``validation.de``).
    Otherwise the text of the unpacked archives is used.

    An item is a pair (source, target) of int64 tensors of shape (tokens + 2,). Each tensor starts
    with the id 2, which marks the beginning, and ends with the id 3, which marks the end.
    :func:`~mlbench_core.dataset.nlp.pytorch.batches.build_collate_fn` makes batches of them, and
    :class:`~mlbench_core.dataset.nlp.pytorch.batches.BucketBatchSampler` distributes them to
    workers.

    Attributes:
        tokenizer: The tokenizer, a
            :class:`~mlbench_core.dataset.nlp.pytorch.wmt16.wmt16_tokenizer.WMT16Tokenizer`.
        vocab_size: Number of ids.
        lengths: Number of ids of each pair's source and target, without beginning and end; int64 of
            shape (pairs, 2).

    Args:
        root: Folder of the data.
        lang: Languages of source and target.
        math_precision: With ``"fp16"`` or ``"bf16"``, unused symbols pad the vocabulary to a
            multiple of 8.
        download: If True, download missing data. The training data has 1.6 GB and takes a while to
            prepare.
        train: If True, load the training part, 4.6 million pairs.
        validation: If True, load the validation part, 3,003 pairs.
        lazy: If True, keep the ids on the disk and read them when needed, instead of all at the
            start.
        preprocessed: If True, the words of the text are already escaped and divided into sub-words,
            as in the file ``train.tok.clean.bpe.32000.en`` of other programs. The vocabulary of the
            text must be in ``root``.
        sort: If True, sort the pairs by the length of the source, the longest first.
        min_len: Leave out pairs in which one sentence has fewer sub-words.
        max_len: Leave out pairs in which one sentence has more sub-words; None for no limit.
        max_size: Keep at most this number of pairs, from the start; None keeps all.
        merges: Number of merges of a learned vocabulary.
        cache_dir: Folder for vocabulary and store; None for a folder in the user's MLBench folder.

    Raises:
        ValueError: Not exactly one of ``train`` and ``validation`` is True, or an argument is
            outside the values listed above.
        DatasetNotFoundError: The text of the part, or the training text for a vocabulary, does not
            exist.
        DatasetError: The text is damaged, or its languages have different numbers of lines.
        DownloadError: The download failed.

    References:
        Bojar et al. 2016, Findings of the 2016 Conference on Machine Translation.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        lang: tuple[str, str] = ("en", "de"),
        math_precision: str | None = None,
        download: bool = True,
        train: bool = False,
        validation: bool = False,
        lazy: bool = False,
        preprocessed: bool = False,
        sort: bool = False,
        min_len: int = 0,
        max_len: int | None = None,
        max_size: int | None = None,
        *,
        merges: int = 32_000,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        folder, name = Path(root), choose_part(train=train, validation=validation)
        words: str | None = "moses"
        # The words of such a text are divided already.
        if preprocessed:
            words = None
        recipe = Recipe(lang, tokenizer=words, merges=merges)
        find = functools.partial(_files, folder, lang, download, preprocessed)
        part = load_part(find, name, recipe, root=folder, cache_dir=cache_dir, in_memory=not lazy)
        tokenizer = WMT16Tokenizer(
            part.vocabulary_folder, math_precision, lang=lang[0], escaped=preprocessed
        )
        super().__init__(
            part, tokenizer, sort=sort, min_len=min_len, max_len=max_len, max_size=max_size
        )

    def prepare(self) -> None:
        """Do nothing, for scripts of version 3.0: the data set is ready after construction."""


def _files(
    folder: Path, languages: tuple[str, str], download: bool, preprocessed: bool, name: str
) -> PairFiles:
    """Return the text of a part; download it if it is missing."""
    names: tuple[str, ...] = _NAMES[name]
    # The names of divided text come first; plain names are accepted as well.
    if preprocessed:
        names = _DIVIDED_NAMES[name] + names
    if files := find_files(folder, names, languages):
        return files
    if not preprocessed:
        return download_files(folder, WMT16_ARCHIVES[name], languages, download)
    advice = "pass preprocessed=False, which reads raw text"
    if binary := next(folder.glob("*.bin"), None):
        advice = (
            f"{binary.name}, data that version 3.0 prepared, may contain pickled code and is not "
            "read; put its text and vocabulary into the folder, or pass preprocessed=False, which "
            "reads raw text"
        )
    raise DatasetError(f"{folder} has no {names[0]}.{languages[0]}: {advice}")


def download_text(folder: Path) -> None:
    """Download the English and German text of all parts that are missing in a folder.

    Args:
        folder: Destination folder.

    Raises:
        DownloadError: A download failed, or its text does not have the expected number of lines.
        DatasetError: An archive is damaged.
    """
    for name in WMT16_ARCHIVES:
        _files(folder, ("en", "de"), True, False, name)
