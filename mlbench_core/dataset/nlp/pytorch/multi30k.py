"""Multi30k, English-German: captions of photos.

The data is small enough to train both translation models on two cores.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from mlbench_core.dataset.download import progress_download
from mlbench_core.dataset.local_files import find_file
from mlbench_core.dataset.nlp.pytorch.pair_datasets import RecurrentPairs, TransformerPairs
from mlbench_core.dataset.nlp.pytorch.pair_part import choose_part, find_files, load_part
from mlbench_core.dataset.nlp.pytorch.pair_text import PairFiles, Recipe
from mlbench_core.dataset.nlp.pytorch.wmt16.wmt16_tokenizer import WMT16Tokenizer
from mlbench_core.dataset.registry import (
    MULTI30K_ARCHIVE_SHA256,
    MULTI30K_NAMES,
    MULTI30K_SHA256,
    MULTI30K_URL,
)
from mlbench_core.errors import DatasetNotFoundError

__all__ = ["Multi30k", "download_text"]

_TOKENIZERS = {"subwords": "moses", "spacy": "spacy"}


class Multi30k(RecurrentPairs):
    """One part of Multi30k: 29,000 pairs to train, 1,014 to validate, 1,000 to test.

    The raw text must be in ``root``: ``train.en``, ``val.en``, ``test_2016_flickr.en``, and the
    same with ``.de``, plain or compressed. Vocabulary and store are created as for WMT16, and kept
    in the user's cache folder.

    Items and methods are those of
    :class:`~mlbench_core.dataset.nlp.pytorch.wmt16_dataset.WMT16Dataset`; :meth:`for_transformer`
    returns the same pairs in the format of
    :class:`~mlbench_core.dataset.nlp.pytorch.wmt17_dataset.WMT17Dataset`.

    Args:
        root: Folder of the text.
        lang: Languages of source and target.
        train: If True, load the training part.
        validation: If True, load the validation part.
        test: If True, load the test part of 2016.
        math_precision: With ``"fp16"`` or ``"bf16"``, unused symbols pad the vocabulary to a
            multiple of 8.
        tokens: ``"subwords"`` divides Moses' words into parts; ``"spacy"`` uses whole words by
            spaCy's rules.
        vocab_size: Number of sub-words.
        min_count: Minimum count of a word with ``"spacy"``; a rarer one is unknown.
        sort: If True, sort the pairs by the length of the source, the longest first.
        min_len: Leave out pairs with a side of fewer symbols.
        max_len: Leave out pairs with a side of more symbols; None for no limit.
        max_size: Keep at most this number of pairs, from the start; None keeps all.
        cache_dir: Folder for vocabulary and store; if None, one below the user's MLBench folder.

    Raises:
        ValueError: Not exactly one part is requested, or an argument is outside the values listed
            above.
        DatasetNotFoundError: The text of the part, or the training text, does not exist.
        DatasetError: The text is damaged, or its languages have different numbers of lines.

    Example:
        >>> import tempfile
        >>> english, german = "A dog runs.\\nIt sleeps.\\n", "Ein Hund rennt.\\nEr schläft.\\n"
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "train.en").write_text(english, encoding="utf-8")
        ...     _ = Path(folder, "train.de").write_text(german, encoding="utf-8")
        ...     pairs = Multi30k(folder, train=True, vocab_size=60, cache_dir=Path(folder, "cache"))
        ...     source, target = pairs[1]
        ...     sample = pairs.for_transformer()[0]
        ...     len(pairs), pairs.tokenizer.detokenize(target), sample["source"][-1].item()
        (2, 'Er schläft.', 1)

    References:
        Elliott, Frank, Sima'an and Specia 2016, Multi30K: Multilingual English-German Image
        Descriptions, arXiv 1605.00459.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        lang: tuple[str, str] = ("en", "de"),
        train: bool = False,
        validation: bool = False,
        test: bool = False,
        *,
        math_precision: str | None = None,
        tokens: str = "subwords",
        vocab_size: int = 8_000,
        min_count: int = 2,
        sort: bool = False,
        min_len: int = 0,
        max_len: int | None = None,
        max_size: int | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if tokens not in _TOKENIZERS:
            raise ValueError(
                f"tokens must be one of {', '.join(map(repr, _TOKENIZERS))}, not {tokens!r}"
            )
        folder, name = Path(root), choose_part(train=train, validation=validation, test=test)
        recipe = Recipe(lang, tokenizer=_TOKENIZERS[tokens], size=vocab_size, min_count=min_count)
        # 29,000 pairs fit in memory easily.
        part = load_part(
            functools.partial(_files, folder, lang),
            name,
            recipe,
            root=folder,
            cache_dir=cache_dir,
            in_memory=True,
        )
        tokenizer = WMT16Tokenizer(
            part.vocabulary_folder, math_precision, lang=lang[0], tokenizer=recipe.tokenizer
        )
        super().__init__(
            part, tokenizer, sort=sort, min_len=min_len, max_len=max_len, max_size=max_size
        )

    def for_transformer(self, **options: Any) -> TransformerPairs:
        """Return the same pairs for the Transformer, with its dictionary, samples and ``collater``.

        Args:
            options: ``left_pad``, ``max_positions``, ``seq_len_multiple`` and ``shuffle``, as for
                :class:`~mlbench_core.dataset.nlp.pytorch.pair_datasets.TransformerPairs`.

        Returns:
            The data set. The numbers of its symbols differ from the ids of this data set.
        """
        return TransformerPairs(self.part, indices=self.indices, **options)


def _files(folder: Path, languages: tuple[str, str], name: str) -> PairFiles:
    files = find_files(folder, MULTI30K_NAMES[name], languages)
    if files is None:
        names = " and ".join(f"{MULTI30K_NAMES[name][0]}.{lang}" for lang in languages)
        raise DatasetNotFoundError(
            f"{folder} has no {names} (or the same compressed); 'mlbench data fetch multi30k' "
            "downloads them from data/task1/raw of https://github.com/multi30k/dataset"
        )
    return files


def download_text(folder: Path) -> None:
    """Download the files of the text that a folder does not have, plain or compressed.

    Args:
        folder: Destination folder.

    Raises:
        DownloadError: The download failed.
    """
    for name in MULTI30K_SHA256:
        if find_file([folder], [name]) is None:
            progress_download(
                f"{MULTI30K_URL}{name}.gz",
                folder / f"{name}.gz",
                sha256=MULTI30K_ARCHIVE_SHA256[name],
            )
