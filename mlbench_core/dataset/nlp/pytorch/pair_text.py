"""Create a vocabulary and a store from files of sentence pairs."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlbench_core.dataset.download import show_progress
from mlbench_core.dataset.local_files import count_lines, digest_texts, read_lines
from mlbench_core.dataset.nlp.pytorch.pair_store import Numbers, PairHeader, PairStore, write_pairs
from mlbench_core.dataset.nlp.pytorch.subtoken_vocabulary import SubtokenVocabulary
from mlbench_core.dataset.nlp.pytorch.subwords import Subwords, learn_subwords, learn_words
from mlbench_core.dataset.nlp.pytorch.words import split_words
from mlbench_core.errors import DatasetError
from mlbench_core.files import creating_folder, lock

__all__ = ["Cleaning", "PairFiles", "Recipe", "prepare_store", "prepare_subwords"]

_log = logging.getLogger(__name__)

_BLOCK = 4096  # pairs that are in memory at once
_VERSION = 2  # of prepared texts: increase it if splitting or cleaning changes


@dataclass(frozen=True)
class PairFiles:
    """The text of one part of a data set: line i of the targets translates line i of the sources.

    Attributes:
        sources: Files in the first language, read one after another: plain or compressed text, or
            ``.sgm`` as in the archives of the translation conferences.
        targets: Files in the second language.
    """

    sources: tuple[Path, ...]
    targets: tuple[Path, ...]


@dataclass(frozen=True)
class Cleaning:
    """The rules that a pair of a training text must fulfill; other pairs are left out.

    Attributes:
        min_words: Minimum number of words of each side.
        max_words: Maximum number of words of each side.
        max_ratio: Maximum ratio of the numbers of words of the two sides.
    """

    min_words: int = 1
    max_words: int = 80
    max_ratio: float = 9.0

    def keeps(self, source: Sequence[str], target: Sequence[str]) -> bool:
        """Return True if a pair fulfills the rules."""
        few, many = sorted((len(source), len(target)))
        return self.min_words <= few and many <= self.max_words and many <= self.max_ratio * few


@dataclass(frozen=True)
class Recipe:
    """The settings for learning a vocabulary and splitting text into words.

    Attributes:
        languages: Languages of source and target.
        tokenizer: ``"moses"`` for words that are divided into parts, ``"spacy"`` for whole words,
            ``"lines"`` for lines that the vocabulary itself splits, None for text that is already
            split into words and divided.
        merges: Number of merges. Pass either this or ``size``.
        size: Number of symbols. Pass either this or ``merges``.
        min_count: Minimum count of a whole word; a rarer one gets no symbol.
        min_character_count: Minimum count of a character; a rarer one gets no symbol.
        separator: Mark of a part that does not end its word.

    Raises:
        ValueError: There are not two languages.
    """

    languages: tuple[str, str]
    tokenizer: str | None = "moses"
    merges: int | None = None
    size: int | None = None
    min_count: int = 2
    min_character_count: int = 1
    separator: str = "@@"

    def __post_init__(self) -> None:
        if isinstance(self.languages, str) or len(self.languages) != 2:
            raise ValueError(f"lang must be two languages, as ('en', 'de'), not {self.languages!r}")


def prepare_subwords(files: PairFiles, recipe: Recipe, cache_dir: Path) -> tuple[Subwords, Path]:
    """Learn a vocabulary from both languages of a training text, or load an earlier result.

    Args:
        files: The text.
        recipe: The settings.
        cache_dir: Folder for the vocabulary and the text in words. If several processes call this,
            one of them creates the files and the others wait.

    Returns:
        The vocabulary, and its folder.

    Raises:
        DatasetError: The text is damaged, or its languages have different numbers of lines.
    """
    folder = cache_dir / f"vocabulary-{_digest(files, asdict(recipe))}"
    # With the lock, other processes wait for the one that prepares the files.
    with lock(cache_dir / f".{folder.name}.lock"):
        if not folder.is_dir():
            words = _prepare_words(files, recipe, Cleaning(), cache_dir)
            lines = itertools.chain.from_iterable(map(read_lines, (*words.sources, *words.targets)))
            if recipe.tokenizer == "spacy":
                subwords = learn_words(
                    lines, min_count=recipe.min_count, separator=recipe.separator
                )
            else:
                subwords = learn_subwords(
                    lines,
                    merges=recipe.merges,
                    size=recipe.size,
                    separator=recipe.separator,
                    min_character_count=recipe.min_character_count,
                )
            with creating_folder(folder) as new:
                subwords.save(new, str(recipe.merges or recipe.size or "words"))
    return Subwords.load(folder, recipe.separator), folder


def prepare_store(
    files: PairFiles,
    recipe: Recipe,
    subwords: Subwords | SubtokenVocabulary,
    cache_dir: Path,
    *,
    cleaning: Cleaning | None = None,
    in_memory: bool = False,
) -> PairStore:
    """Create the store of a text, or open the existing one.

    Args:
        files: The text.
        recipe: The settings for words.
        subwords: The vocabulary.
        cache_dir: Folder for the store. If several processes call this, one of them creates the
            store and the others wait.
        cleaning: Rules for the pairs to keep; None keeps all.
        in_memory: If True, read the store into memory instead of mapping it.

    Returns:
        The store. Its numbers are those of the vocabulary's ``encode``.

    Raises:
        DatasetError: The text is damaged, or its languages have different numbers of lines.
    """
    settings = asdict(recipe)
    settings["cleaning"] = asdict(cleaning) if cleaning else None
    settings["vocabulary"] = subwords.checksum
    folder = cache_dir / f"pairs-{_digest(files, settings)}"
    with lock(cache_dir / f".{folder.name}.lock"):
        try:
            # Opening an existing store checks it. A damaged one is replaced below.
            return PairStore(folder, in_memory, subwords.checksum)
        except DatasetError as error:
            if folder.exists():
                _log.warning("%s", error)
        extra = {"recipe": settings}
        header = PairHeader(recipe.languages, subwords.size, subwords.checksum, extra=extra)
        # The words come before the progress bar of the store, because a terminal shows one bar at a
        # time.
        if recipe.tokenizer in ("moses", "spacy"):
            files = _prepare_words(files, recipe, cleaning, cache_dir)
            # These files have only the pairs that the rules keep.
            cleaning = None
        with show_progress("sub-words", None) as advance:
            blocks = _encode(_blocks(files, cleaning), subwords, advance)
            store = write_pairs(folder, header, blocks)
    if in_memory:
        return PairStore(folder, in_memory)
    return store


def _blocks(text: PairFiles, cleaning: Cleaning | None) -> Iterator[tuple[list[str], list[str]]]:
    """Yield blocks of pairs, without white space at the ends of lines."""
    sources: list[str] = []
    targets: list[str] = []
    for source, target in _read_pairs(text):
        if cleaning and not cleaning.keeps(source.split(), target.split()):
            continue
        sources.append(source.strip())
        targets.append(target.strip())
        if len(sources) == _BLOCK:
            yield sources, targets
            sources, targets = [], []
    if sources:
        yield sources, targets


def _encode(
    blocks: Iterable[tuple[list[str], list[str]]],
    subwords: Subwords | SubtokenVocabulary,
    advance: Callable[[int], None],
) -> Iterator[tuple[Sequence[Numbers], Sequence[Numbers]]]:
    """Yield the numbers of the symbols of each block, and report its pairs as done."""
    for sources, targets in blocks:
        yield subwords.encode(sources), subwords.encode(targets)
        advance(len(sources))


def _prepare_words(
    files: PairFiles, recipe: Recipe, cleaning: Cleaning | None, cache_dir: Path
) -> PairFiles:
    """Return a text in words, from which both the vocabulary and the store are created.

    Each file of the text has its own result. After an interruption, finished files are therefore
    not split again.
    """
    sources, targets = [], []
    for source, target in zip(files.sources, files.targets, strict=True):
        folder = _split_words(PairFiles((source,), (target,)), recipe, cleaning, cache_dir)
        sources.append(folder / "source.txt")
        targets.append(folder / "target.txt")
    return PairFiles(tuple(sources), tuple(targets))


def _split_words(
    files: PairFiles, recipe: Recipe, cleaning: Cleaning | None, cache_dir: Path
) -> Path:
    """Split one file and its translation into words, and return the folder of the result."""
    settings = [recipe.languages, recipe.tokenizer, asdict(cleaning) if cleaning else None]
    folder = cache_dir / f"words-{_digest(files, settings)}"
    with lock(cache_dir / f".{folder.name}.lock"):
        if folder.is_dir():
            return folder
        read = kept = 0
        source = files.sources[0]
        source_lang, target_lang = recipe.languages
        tokenizer = recipe.tokenizer or "moses"
        with (
            creating_folder(folder) as new,
            # Do not translate line ends: a text must have the same bytes on every system.
            (new / "source.txt").open("w", encoding="utf-8", newline="\n") as source_file,
            (new / "target.txt").open("w", encoding="utf-8", newline="\n") as target_file,
            show_progress(f"words of {source.name}", count_lines(source)) as advance,
        ):
            for source_line, target_line in _read_pairs(files):
                read += 1
                source_words = split_words(source_line, source_lang, tokenizer)
                target_words = split_words(target_line, target_lang, tokenizer)
                if cleaning is None or cleaning.keeps(source_words, target_words):
                    kept += 1
                    source_file.write(" ".join(source_words) + "\n")
                    target_file.write(" ".join(target_words) + "\n")
                # Not for each pair, because an update of the bar takes time.
                if read % _BLOCK == 0:
                    advance(_BLOCK)
    _log.info("%s: kept %d of %d pairs", source, kept, read)
    return folder


def _read_pairs(files: PairFiles) -> Iterator[tuple[str, str]]:
    """Yield pairs of lines; both languages must have the same number of lines."""
    for source, target in zip(files.sources, files.targets, strict=True):
        # `zip` would silently stop at the end of the shorter text.
        for lines in itertools.zip_longest(read_lines(source), read_lines(target)):
            if lines[0] is None or lines[1] is None:
                raise DatasetError(
                    f"{source} has {count_lines(source)} lines and {target} "
                    f"{count_lines(target)}; each line must be the translation of the same line of "
                    "the other file"
                )
            yield lines


def _digest(files: PairFiles, settings: Any) -> str:
    return digest_texts((*files.sources, *files.targets), [_VERSION, settings])
