"""Find or download one part of a translation data set, split it into sub-words, and store it."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlbench_core.dataset.download import maybe_download_and_extract_tar_gz
from mlbench_core.dataset.local_files import count_lines, find_file, read_lines
from mlbench_core.dataset.nlp.pytorch.pair_store import PairStore
from mlbench_core.dataset.nlp.pytorch.pair_text import (
    Cleaning,
    PairFiles,
    Recipe,
    prepare_store,
    prepare_subwords,
)
from mlbench_core.dataset.nlp.pytorch.subtoken_vocabulary import SubtokenVocabulary
from mlbench_core.dataset.nlp.pytorch.subwords import Subwords
from mlbench_core.dataset.registry import Archive
from mlbench_core.errors import DatasetError, DatasetNotFoundError, DownloadError
from mlbench_core.files import lock, move_into_place
from mlbench_core.paths import user_folder

__all__ = [
    "SPECIAL_SYMBOLS",
    "Part",
    "choose_part",
    "download_files",
    "find_files",
    "load_part",
]

_log = logging.getLogger(__name__)

SPECIAL_SYMBOLS = ("<pad>", "<unk>", "<s>", "</s>")
"""Symbols that other programs write into their vocabulary files.

Here they have fixed numbers and are not written.
"""

_NEWSTEST2014_LINES = 3_003
_NEWSTEST2014_FILTERED_LINES = 2_737


@dataclass(frozen=True)
class Part:
    """A part of a translation data set with its store.

    Attributes:
        files: The text of the part.
        store: The pairs as numbers of symbols.
        subwords: The vocabulary.
        vocabulary_folder: Folder of the vocabulary's files.
        recipe: The settings for words and symbols.
        is_cleaned: If True, the store does not have all pairs of the text.
    """

    files: PairFiles
    store: PairStore
    subwords: Subwords | SubtokenVocabulary
    vocabulary_folder: Path
    recipe: Recipe
    is_cleaned: bool

    @property
    def has_references(self) -> bool:
        """Return True if the text is raw and its lines correspond to the pairs."""
        return self.recipe.tokenizer is not None and not self.is_cleaned

    def read_targets(self, indices: Iterable[int]) -> list[str]:
        """Return the translations as they are in the text: the references for BLEU.

        Args:
            indices: Numbers of pairs in the store.

        Returns:
            Lines of text.

        Raises:
            ValueError: The text is not raw; or pairs were left out, as in training parts, so that
                lines and pairs do not correspond.
        """
        if self.recipe.tokenizer is None:
            raise ValueError(
                "references must be raw text, not text that is divided into sub-words: use raw text"
            )
        if self.is_cleaned:
            raise ValueError(
                "references must be of a complete part, not of a training part, from which "
                "pairs were left out: use another part"
            )
        # Read the text, because the store has sub-words and not the original lines.
        lines = list(itertools.chain.from_iterable(map(read_lines, self.files.targets)))
        return [lines[index] for index in indices]


def choose_part(**parts: bool) -> str:
    """Return the one part that is requested.

    Raises:
        ValueError: No part is requested, or several are.

    Example:
        >>> choose_part(train=False, validation=True)
        'validation'
    """
    chosen = []
    for part, wanted in parts.items():
        if wanted:
            chosen.append(part)
    if len(chosen) != 1:
        raise ValueError(
            f"exactly one of {', '.join(parts)} must be True, not "
            f"{' and '.join(chosen) or 'none of them'}"
        )
    return chosen[0]


def find_files(folder: Path, names: Iterable[str], languages: Sequence[str]) -> PairFiles | None:
    """Return the first of some names that exists as ``NAME.LANG`` in both languages."""
    source_lang, target_lang = languages
    for name in names:
        source = find_file([folder], [f"{name}.{source_lang}"])
        target = find_file([folder], [f"{name}.{target_lang}"])
        if source and target:
            if name.startswith("newstest2014"):
                _check_newstest2014(source)
            return PairFiles((source,), (target,))
    return None


def download_files(
    folder: Path, archives: Sequence[Archive], languages: Sequence[str], download: bool
) -> PairFiles:
    """Return the text of a part from its archives; download and unpack them if they are missing.

    Args:
        folder: Destination folder.
        archives: Archives whose concatenated texts are the part.
        languages: Languages of source and target, ``en`` and ``de`` in any order.
        download: If True, download missing archives.

    Returns:
        The files.

    Raises:
        ValueError: The archives do not have these languages.
        DatasetNotFoundError: A text is missing and ``download`` is False.
        DownloadError: A download failed, or its text does not have the expected number of lines.
    """
    if sorted(languages) != ["de", "en"]:
        raise ValueError(f"lang must be en and de for this data set, not {tuple(languages)}")
    pairs = []
    for archive in archives:
        paths = [folder / archive.text_path(lang) for lang in languages]
        missing = [path for path in paths if not path.is_file()]
        if missing and not download:
            raise DatasetNotFoundError(
                f"{missing[0]} does not exist; download=True or 'mlbench data fetch' gets it "
                f"from {archive.url}"
            )
        if missing:
            # One process downloads. The others find the files once they have the lock.
            with lock(folder / ".download.lock"):
                if not all(map(Path.is_file, paths)):
                    _download(folder, archive, languages)
        pairs.append(paths)
    sources, targets = zip(*pairs, strict=True)
    return PairFiles(sources, targets)


def load_part(
    find: Callable[[str], PairFiles],
    name: str,
    recipe: Recipe,
    *,
    root: Path,
    cache_dir: str | os.PathLike[str] | None,
    in_memory: bool,
    vocabulary: Path | None = None,
) -> Part:
    """Load vocabulary and store of a part; create both if they do not exist yet.

    Args:
        find: Function that returns the text of the part with a given name. If ``name`` is not
            ``"train"``, it is called for the training text only to learn a vocabulary.
        name: Name of the part; raw text of ``"train"`` is cleaned.
        recipe: The settings for words and symbols.
        root: Folder of the data. If it has a vocabulary ``vocab.bpe.NAME``, this is used instead of
            a learned one.
        cache_dir: Folder for vocabulary and stores; None for the user's cache folder.
        in_memory: If True, read the store into memory.
        vocabulary: File with sub-tokens that is used instead of any other vocabulary; None for no
            such file. The recipe's tokenizer must be ``"lines"`` with a file.

    Returns:
        The part.

    Raises:
        DatasetNotFoundError: The file with sub-tokens does not exist; or the text is divided
            already, and the vocabulary is missing.
        DatasetError: The file is not a vocabulary.
    """
    subwords: Subwords | SubtokenVocabulary | None = None
    # Before find(): an error in the file must show before a long download.
    if vocabulary is not None:
        subwords, folder = SubtokenVocabulary.load(vocabulary), vocabulary.parent
    files = find(name)
    if cache_dir:
        cache = Path(cache_dir)
    else:
        cache = user_folder("cache", "text")
    if subwords is None:
        subwords, folder = _find_subwords(find, recipe, root, cache)
    # Drop the merges, because divided text must not be divided again.
    if recipe.tokenizer is None:
        subwords = Subwords(subwords.symbols, None, recipe.separator)
    cleaning = None
    # The program that divided a text has also cleaned it.
    if name == "train" and recipe.tokenizer is not None:
        cleaning = Cleaning()
    store = prepare_store(files, recipe, subwords, cache, cleaning=cleaning, in_memory=in_memory)
    return Part(files, store, subwords, folder, recipe, cleaning is not None)


def _find_subwords(
    find: Callable[[str], PairFiles], recipe: Recipe, root: Path, cache: Path
) -> tuple[Subwords, Path]:
    """Return the vocabulary of the data's folder, or learn one from the training text."""
    if any(root.glob("vocab.bpe.*")):
        return Subwords.load(root, recipe.separator, skip=SPECIAL_SYMBOLS), root
    if recipe.tokenizer is None:
        raise DatasetNotFoundError(
            f"{root} has no vocabulary vocab.bpe.NAME, which text that is divided already needs"
        )
    return prepare_subwords(find("train"), recipe, cache)


def _download(folder: Path, archive: Archive, languages: Sequence[str]) -> None:
    """Download and unpack an archive, and move its text into place if it is complete."""
    file_name = archive.url.rsplit("/", 1)[1]
    unpacked = folder / "downloads" / file_name.partition(".")[0]
    maybe_download_and_extract_tar_gz(unpacked, file_name, archive.url)
    # Count the lines of all files before the first one is moved, so that a wrong text is never
    # used.
    for lang in languages:
        path = unpacked / archive.text_path(lang)
        # A missing text has too few lines, like one that is cut off.
        lines = 0
        if path.is_file():
            lines = count_lines(path)
        if lines != archive.lines:
            raise DownloadError(
                f"{path} from {archive.url} has {lines} lines, not {archive.lines}: delete "
                f"{path.parent} and get the archive from another place"
            )
    for lang in languages:
        text = archive.text_path(lang)
        target = folder / text
        target.parent.mkdir(parents=True, exist_ok=True)
        move_into_place(unpacked / text, target)


def _check_newstest2014(path: Path) -> None:
    """Refuse the filtered copy of the test set, because its BLEU scores are not comparable."""
    lines = count_lines(path)
    if lines == _NEWSTEST2014_FILTERED_LINES:
        raise DatasetError(
            f"{path} is the filtered copy of newstest2014 with {lines} lines, not the whole text "
            f"of {_NEWSTEST2014_LINES}: get https://www.statmt.org/wmt14/test-full.tgz"
        )
    if lines != _NEWSTEST2014_LINES:
        _log.warning("%s has %d lines; newstest2014 has %d", path, lines, _NEWSTEST2014_LINES)
