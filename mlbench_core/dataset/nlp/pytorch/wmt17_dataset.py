"""WMT17, English-German: the data of task 4b."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from mlbench_core.dataset.nlp.pytorch.pair_datasets import TransformerPairs
from mlbench_core.dataset.nlp.pytorch.pair_part import (
    choose_part,
    download_files,
    find_files,
    load_part,
)
from mlbench_core.dataset.nlp.pytorch.pair_text import PairFiles, Recipe
from mlbench_core.dataset.registry import WMT17_ARCHIVES

__all__ = ["WMT17Dataset", "download_text"]

_NAMES = {
    "train": ("train",),
    "validation": ("newstest2013", "validation", "val"),
    "test": ("newstest2014", "test"),
}
_SPECIAL = 3  # padding, end and unknown are not in the vocabulary's file
# Characters of other scripts, which are frequent in text from the web, would fill the vocabulary.
_RARE = 50


class WMT17Dataset(TransformerPairs):
    """One part of WMT17 English-German.

    The training text is Europarl 7, Common Crawl and News Commentary 12; newstest2013 is for
    validation and newstest2014 for test.

    The text is cleaned and split into words, and the words into sub-words with a vocabulary of both
    languages. If ``root`` has a vocabulary (``vocab.bpe.NAME`` and ``bpe.NAME``), it is used.
    Otherwise a vocabulary of 32,768 symbols is learned from the training text; characters that
    occur fewer than 50 times get no symbol. The result is stored, and later runs map it into
    memory. A training pair is left out if a side has fewer than 1 or more than 80 words, or more
    than 9 times as many words as the other side.

    With ``vocabulary``, the text is divided into the sub-tokens of MLPerf's reference instead. Only
    white space at the ends of lines is removed before. The numbers of the dictionary are those of
    the file. For the rule that leaves out training pairs, words are then separated by white space.

    To use your own text, put ``train.en``, ``validation.en``, ``test.en`` and so on into ``root``,
    plain or compressed. Otherwise the text of the unpacked archives is used.

    :func:`~mlbench_core.dataset.nlp.pytorch.batches.get_batches` cuts the data set into batches,
    :func:`~mlbench_core.dataset.nlp.pytorch.batches.shard_batches` distributes them to workers, and
    ``DataLoader(dataset, batch_sampler=batches, collate_fn=dataset.collater)`` loads them.

    Attributes:
        dictionary: The vocabulary of both languages, a
            :class:`~mlbench_core.dataset.nlp.pytorch.wmt17.wmt17_dictionary.Dictionary`; also
            ``src_dict`` and ``trg_dict``.
        sizes: Number of tokens of each pair in a batch, int64 of shape (pairs,).

    Args:
        root: Folder of the data.
        lang: Languages of source and target.
        download: If True, download missing data: 1.6 GB for training, which take a while to
            prepare.
        train: If True, load the training part, 4.6 million pairs.
        validation: If True, load newstest2013, 3,000 pairs.
        test: If True, load newstest2014, 3,003 pairs.
        left_pad: For source and target: if True, pad on the left.
        max_positions: Largest number of tokens of source and target, with the end. Longer pairs of
            the training part are left out. Longer sentences of other parts are cut, because these
            parts must stay complete.
        seq_len_multiple: Pad source and target to multiples of this length.
        shuffle: If True, ``get_batches`` shuffles pairs of the same length.
        vocab_size: Number of symbols of a learned vocabulary, including padding, end and unknown.
        min_character_count: Minimum count of a character in a learned vocabulary; a rarer one gets
            no symbol.
        vocabulary: File with sub-tokens, such as ``vocab.translate_ende_wmt32k.32768.subwords`` or
            ``vocab.ende.32768``, to use instead of the vocabulary in ``root`` or a learned one; see
            :class:`~mlbench_core.dataset.nlp.pytorch.subtoken_vocabulary.SubtokenVocabulary`.
            ``vocab_size`` and ``min_character_count`` are then not used.
        cache_dir: Folder for vocabulary and store; if None, one below the user's MLBench folder.

    Raises:
        ValueError: Not exactly one part is requested, or an argument is outside the values listed
            above.
        DatasetNotFoundError: The text of the part, the training text for a vocabulary, or the file
            ``vocabulary`` does not exist.
        DatasetError: The text is damaged, its languages have different numbers of lines, or
            ``vocabulary`` is not such a file.
        DownloadError: The download failed.

    References:
        Vaswani et al. 2017, Attention Is All You Need, arXiv 1706.03762.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        lang: tuple[str, str] = ("en", "de"),
        download: bool = False,
        train: bool = False,
        validation: bool = False,
        test: bool = False,
        left_pad: tuple[bool, bool] = (True, False),
        max_positions: tuple[int, int] = (256, 256),
        seq_len_multiple: int = 1,
        shuffle: bool = True,
        *,
        vocab_size: int = 32_768,
        min_character_count: int = _RARE,
        vocabulary: str | os.PathLike[str] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        folder, name = Path(root), choose_part(train=train, validation=validation, test=test)
        file: Path | None = None
        size = vocab_size - _SPECIAL
        recipe = Recipe(lang, size=size, min_character_count=min_character_count)
        if vocabulary is not None:
            file, recipe = Path(vocabulary), Recipe(lang, tokenizer="lines")
        find = functools.partial(_files, folder, lang, download)
        part = load_part(
            find, name, recipe, root=folder, cache_dir=cache_dir, in_memory=False, vocabulary=file
        )
        super().__init__(
            part,
            left_pad=left_pad,
            max_positions=max_positions,
            seq_len_multiple=seq_len_multiple,
            shuffle=shuffle,
        )


def _files(folder: Path, languages: tuple[str, str], download: bool, name: str) -> PairFiles:
    """Return the text of a part; download it if it is missing."""
    files = find_files(folder, _NAMES[name], languages)
    return files or download_files(folder, WMT17_ARCHIVES[name], languages, download)


def download_text(folder: Path) -> None:
    """Download the English and German text of all parts that a folder does not have.

    Args:
        folder: Destination folder.

    Raises:
        DownloadError: A download failed, or its text does not have the expected number of lines.
        DatasetError: An archive is damaged.
    """
    for name in WMT17_ARCHIVES:
        _files(folder, ("en", "de"), True, name)
