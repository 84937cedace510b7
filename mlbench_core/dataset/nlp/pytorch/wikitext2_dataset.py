"""WikiText-2 for language models: streams of words, cut into batches of varying length."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mlbench_core import files
from mlbench_core.arguments import check_at_least, check_rank
from mlbench_core.dataset.download import maybe_download_and_extract_zip, progress_download
from mlbench_core.dataset.local_files import find_file
from mlbench_core.dataset.nlp.pytorch.corpus import Corpus, Dictionary, Ids, load_corpus
from mlbench_core.dataset.nlp.pytorch.pair_part import choose_part
from mlbench_core.dataset.registry import (
    WIKITEXT2_FOLDERS,
    WIKITEXT2_HUB_URL,
    WIKITEXT2_NAMES,
    WIKITEXT2_TOKENS,
    WIKITEXT2_URL,
    WIKITEXT2_WORDS,
)
from mlbench_core.errors import (
    DatasetError,
    DatasetNotFoundError,
    DownloadError,
    MissingDependencyError,
    require,
)
from mlbench_core.paths import user_folder

__all__ = ["Dictionary", "Wikitext2Dataset", "download_text", "find_texts"]

_log = logging.getLogger(__name__)

_LENGTH_DEVIATION = 5.0


class Wikitext2Dataset:
    r"""One part of WikiText-2 as parallel streams of words.

    The text is one sequence of words. :meth:`generate_batches` cuts it into equal streams, one for
    each sequence in the batch of all workers, and gives each worker its share of the streams.
    :meth:`generate_sequence_lengths` chooses the length of each batch. :meth:`get_batch` returns
    batches in the order of the text: the model's state at the end of a batch is its state at the
    start of the next one. The concatenated batches of all workers are the batch of a single worker.

    The files are ``train.txt``, ``valid.txt`` and ``test.txt``, or ``wiki.train.tokens`` and so on
    as in the original archive, plain or compressed. They are in ``path`` or in its folder
    ``wikitext-2``. If none of them exists, the archive is downloaded. Any text in files of these
    names works. The first run creates a cache, which later runs map into memory.

    Attributes:
        dictionary: The words of all parts; the training part's come first. WikiText-2 has 33,278.
        tokens: Ids of the part, int32, in the order of the text.
        bptt: As given.

    Args:
        path: Folder of the files.
        bptt: Words of each stream in a batch: the length of back-propagation through time.
        train: If True, load the training part: 2,088,628 tokens.
        valid: If True, load the validation part: 217,646 tokens.
        test: If True, load the test part: 245,569 tokens.
        min_seq_len: Shortest length of a batch whose length is drawn at random.
        download: If True, download the data (4 MB) if ``path`` has none of the files.
        cache_dir: Folder of the caches; if None, one below the user's MLBench folder.
        seed: Seed of the random lengths; the same on every worker.

    Raises:
        ValueError: Not exactly one part is requested, or a length is not positive.
        DatasetNotFoundError: The part or the training part, which is read for the dictionary, is
            missing.
        DatasetError: A file is damaged.
        DownloadError: The download failed.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "train.txt").write_text("a b c\na b d\n")
        ...     cache = Path(folder, "cache")
        ...     dataset = Wikitext2Dataset(folder, bptt=2, train=True, cache_dir=cache)
        >>> dataset.tokens.tolist(), dataset.dictionary.idx2word
        ([0, 1, 2, 3, 0, 1, 4, 3], ['a', 'b', 'c', '<eos>', 'd'])
        >>> dataset.generate_batches(global_bsz=2)
        >>> data, target = dataset.get_batch(0)
        >>> data.T.tolist(), target.view_as(data).T.tolist()
        ([[0, 1], [0, 1]], [[1, 2], [1, 4]])

    References:
        Merity, Xiong, Bradbury and Socher 2016, Pointer Sentinel Mixture Models, arXiv 1609.07843.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        bptt: int,
        train: bool = False,
        valid: bool = False,
        test: bool = False,
        min_seq_len: int = 5,
        *,
        download: bool = True,
        cache_dir: str | os.PathLike[str] | None = None,
        seed: int = 0,
    ) -> None:
        check_at_least("bptt", bptt, 1)
        check_at_least("min_seq_len", min_seq_len, 1)
        self.path, self.part = Path(path), choose_part(train=train, valid=valid, test=test)
        self.bptt, self.min_seq_len, self.seed = bptt, min_seq_len, seed
        corpus = _load(self.path, self.part, download, Path(cache_dir or user_folder("cache")))
        self.dictionary: Dictionary = corpus.dictionary
        self.tokens: Ids = corpus.parts[self.part]
        self.sequence_lengths = torch.empty(0, dtype=torch.int64)
        self._streams: Ids | None = None
        self._epoch = 0

    @property
    def sequence_lengths(self) -> Tensor:
        """Return the length of each batch of the epoch, int64 of shape (batches,).

        :meth:`generate_sequence_lengths` creates it. A script may also write into the tensor, for
        example by ``torch.distributed.broadcast(dataset.sequence_lengths, 0)``, or set it: batches
        follow its content.
        """
        return self._sequence_lengths

    @sequence_lengths.setter
    def sequence_lengths(self, lengths: Tensor | Sequence[int]) -> None:
        tensor = torch.as_tensor(lengths)
        is_integer = not (tensor.is_floating_point() or tensor.is_complex())
        # torch makes floating-point numbers of an empty list.
        if tensor.dim() != 1 or (len(tensor) and not is_integer):
            raise ValueError(
                f"sequence_lengths must be integers of shape (batches,), not {tensor.dtype} of "
                f"shape {tuple(tensor.shape)}: give the length of each batch"
            )
        self._sequence_lengths = tensor.to(torch.int64)

    def generate_batches(
        self,
        global_bsz: int,
        worker_bsz: int | None = None,
        rank: int = 0,
        *,
        world_size: int | None = None,
    ) -> None:
        """Cut the text into streams and select this worker's share of them.

        The remaining words after the last full stream, fewer than ``global_bsz``, are not used. The
        lengths of the batches are those of ``generate_sequence_lengths(random=False)`` until they
        are generated again.

        Args:
            global_bsz: Number of streams, which is the number of sequences in a batch of all
                workers together.
            worker_bsz: Number of streams of each worker: this worker gets ``worker_bsz`` streams
                from number ``rank * worker_bsz`` on. If this and ``world_size`` are None, it gets
                all streams.
            rank: This worker's rank.
            world_size: Number of workers that share the streams as evenly as possible, for
                validation; use it instead of ``worker_bsz``. A worker without streams has no
                batches.

        Raises:
            ValueError: The text is too short for the streams, the worker's streams are not among
                them, or both ``worker_bsz`` and ``world_size`` are given.
        """
        if not 1 <= global_bsz <= len(self.tokens) // 2:
            raise ValueError(
                f"global_bsz must be from 1 to {len(self.tokens) // 2}, not {global_bsz}: each "
                f"stream needs 2 of the {len(self.tokens)} words of the text"
            )
        first, last = _share(global_bsz, worker_bsz, rank, world_size)
        length = len(self.tokens) // global_bsz
        # This is a view of the mapped ids, without a copy of the text.
        streams = self.tokens[: length * global_bsz].reshape(global_bsz, length)
        self._streams = streams[first:last]
        self.generate_sequence_lengths(random=False)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next random lengths, to resume a run.

        Args:
            epoch: Number of the epoch, from 0.
        """
        self._epoch = epoch

    def generate_sequence_lengths(self, random: bool = False) -> None:
        r"""Choose the length of each batch of an epoch.

        Lengths are ``bptt``, or drawn again for each batch, so that batches start at different
        words in each epoch:

        .. math:: \ell = \max(\ell_{\min}, \lfloor n \rfloor), \quad n \sim \mathcal{N}(b, 5^2),
            \quad b = \begin{cases} T & \text{with probability } 0.95 \\ T / 2 & \text{with
            probability } 0.05 \end{cases}

        with :math:`T` = ``bptt`` and :math:`\ell_{\min}` = ``min_seq_len``. The last batch gets the
        remaining words. If these are fewer than ``min_seq_len`` and lengths are random, the
        previous batch gets them instead.

        Random lengths depend on ``seed`` and the epoch alone, so all workers draw the same lengths
        without communication. The first call with ``random=True`` is for epoch 0, and each further
        one for the next epoch, unless :meth:`set_epoch` sets another one.

        Args:
            random: If True, draw lengths at random, otherwise use ``bptt``.

        Raises:
            RuntimeError: :meth:`generate_batches` was not called before.
        """
        # The last word of a stream is only a target, because no word follows it.
        to_predict = self._stream_array().shape[1] - 1
        if random:
            self.sequence_lengths = self._draw_lengths(to_predict)
            self._epoch += 1
        else:
            full, rest = divmod(to_predict, self.bptt)
            lengths = [self.bptt] * full
            if rest:
                lengths.append(rest)
            self.sequence_lengths = lengths

    def _draw_lengths(self, to_predict: int) -> list[int]:
        """Draw random lengths whose sum is ``to_predict``."""
        # The generator depends on seed and epoch alone, so all workers draw the same lengths.
        generator = np.random.default_rng((self.seed, self._epoch))
        lengths: list[int] = []
        while to_predict > 0:
            base = self.bptt if generator.random() < 0.95 else self.bptt / 2
            length = max(self.min_seq_len, int(generator.normal(base, _LENGTH_DEVIATION)))
            # If fewer words than the minimum length would remain, this batch gets them too.
            if to_predict - length < self.min_seq_len:
                length = to_predict
            lengths.append(length)
            to_predict -= length
        return lengths

    def num_batches(self) -> int:
        """Return the number of this worker's batches in the epoch; 0 for a worker without streams.

        Raises:
            RuntimeError: :meth:`generate_batches` was not called before.
        """
        if not len(self._stream_array()):
            return 0
        return len(self.sequence_lengths)

    def get_batch(self, i: int, cuda: bool = False) -> tuple[Tensor, Tensor]:
        """Return one batch.

        Args:
            i: Number of the batch in the epoch, from 0.
            cuda: If True, put it on the current GPU.

        Returns:
            ``(data, target)``. ``data`` has ids of this worker's streams, int64 of shape (length,
            sequences). ``target`` has the id of the word after each of them, int64 of shape (length
            * sequences,), as a loss on flattened scores needs it.

        Raises:
            IndexError: The batch does not exist.
            RuntimeError: :meth:`generate_batches` was not called before.
            ValueError: ``sequence_lengths`` was changed to lengths that do not fit the text.
        """
        streams = self._stream_array()
        if not 0 <= i < self.num_batches():
            raise IndexError(
                f"i must be at least 0 and below {self.num_batches()}, the number of batches, "
                f"not {i}"
            )
        # Read the lengths for each batch, because a broadcast may have written into the tensor.
        start, length = int(self.sequence_lengths[:i].sum()), int(self.sequence_lengths[i])
        to_predict = streams.shape[1] - 1
        if length < 1 or start < 0 or start + length > to_predict:
            raise ValueError(
                f"sequence_lengths must be at least 1 and have a sum of at most {to_predict}, not "
                f"{length} after {start} words: generate them again or send those of one worker "
                "to all"
            )
        # Read one word more than the length, because the targets are the words shifted by one.
        window = streams[:, start : start + length + 1]
        words = torch.from_numpy(window.T.astype(np.int64, order="C"))
        # Pinned memory lets the copy overlap with the computation of the batch before.
        if cuda:
            words = words.pin_memory().cuda(non_blocking=True)
        return words[:-1], words[1:].flatten()

    def _stream_array(self) -> Ids:
        if self._streams is None:
            raise RuntimeError(
                "the text is not cut into batches yet: call generate_batches(global_bsz, ...) first"
            )
        return self._streams

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.part}: {len(self.tokens)} tokens, "
            f"{len(self.dictionary)} words)"
        )


def _share(
    global_bsz: int, worker_bsz: int | None, rank: int, world_size: int | None
) -> tuple[int, int]:
    """Return the first stream of a worker, and the one after its last."""
    if world_size is not None:
        if worker_bsz is not None:
            raise ValueError(
                "only one of worker_bsz and world_size can be given, not both: each sets this "
                "worker's share"
            )
        check_rank(rank, world_size)
        return rank * global_bsz // world_size, (rank + 1) * global_bsz // world_size
    if worker_bsz is None:
        return 0, global_bsz
    first, last = rank * worker_bsz, (rank + 1) * worker_bsz
    if not 0 <= first < last <= global_bsz:
        raise ValueError(
            f"worker_bsz must be the share of one worker, so that streams {first} to {last - 1} "
            f"of rank {rank} are among the {global_bsz} of global_bsz, not {worker_bsz}"
        )
    return first, last


def _load(folder: Path, part: str, download: bool, cache_dir: Path) -> Corpus:
    """Load the corpus of a folder, which must contain the training part and the requested part."""
    if download:
        download_text(folder)
    texts = find_texts(folder)
    for required in ("train", part):
        if required not in texts:
            names = " or ".join(_names(required))
            raise DatasetNotFoundError(
                f"{folder} has no {names} (or the same compressed); put the files of WikiText-2 "
                f"there, from {WIKITEXT2_URL} or by 'mlbench data fetch wikitext2'"
            )
    return load_corpus(texts, cache_dir)


def download_text(folder: Path) -> None:
    """Download the text, unless the folder has a part of it.

    Args:
        folder: Destination folder.

    Raises:
        DownloadError: The download failed.
        DatasetError: The download is damaged.
    """
    if find_texts(folder):
        return
    with files.lock(folder / ".download.lock"):
        # Another process may have downloaded the text while this one waited for the lock.
        if not find_texts(folder):
            _download(folder)


def find_texts(folder: Path) -> dict[str, Path]:
    """Return the file of each part that exists, the training part first.

    Args:
        folder: The folder of the text, or the one above ``wikitext-2``.
    """
    folders = [folder / below for below in WIKITEXT2_FOLDERS]
    texts = {}
    for part in WIKITEXT2_TOKENS:
        if path := find_file(folders, _names(part)):
            texts[part] = path
    return texts


def _names(part: str) -> list[str]:
    """Return the names that the file of a part may have, without the ending of a compression."""
    return [name.format(part=part) for name in WIKITEXT2_NAMES]


def _download(folder: Path) -> None:
    """Download the text from the first mirror that has it, check it, and move it in one step.

    No published checksum is valid for all mirrors, so the function checks the numbers of tokens and
    words instead.
    """
    unpacked = folder / "downloads"
    try:
        maybe_download_and_extract_zip(unpacked, WIKITEXT2_URL.rsplit("/", 1)[1], WIKITEXT2_URL)
    except DownloadError as error:
        _log.warning("%s; trying the Hugging Face hub", error)
        _download_from_hub(unpacked / WIKITEXT2_FOLDERS[1], error)
    # Do not create a cache, because the files move below.
    corpus = load_corpus(find_texts(unpacked), cache_dir=None)
    tokens = {part: len(ids) for part, ids in corpus.parts.items()}
    if tokens != WIKITEXT2_TOKENS or len(corpus.dictionary) != WIKITEXT2_WORDS:
        raise DatasetError(
            f"the download in {unpacked} is not WikiText-2: it has {tokens} tokens and "
            f"{len(corpus.dictionary)} words instead of {WIKITEXT2_TOKENS} and {WIKITEXT2_WORDS}; "
            "delete the folder and get the data from another place"
        )
    files.move_into_place(unpacked / WIKITEXT2_FOLDERS[1], folder / WIKITEXT2_FOLDERS[1])


def _download_from_hub(folder: Path, reason: DownloadError) -> None:
    """Download the tables of the Hugging Face hub, and write their rows as lines of text."""
    try:
        parquet: Any = require("pyarrow.parquet", "text")
    except MissingDependencyError as error:
        raise DownloadError(
            f"{reason}; the other mirror has the text in a format that needs another package: "
            f"{error}"
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    for part, name in (("train", "train"), ("valid", "validation"), ("test", "test")):
        with tempfile.TemporaryDirectory(prefix=".table-", dir=folder) as scratch:
            url = WIKITEXT2_HUB_URL.format(name=name)
            try:
                table = progress_download(url, Path(scratch, f"{name}.parquet"))
            except DownloadError as error:
                raise reason from error  # it names the file that the user can bring along
            rows = parquet.read_table(table, columns=["text"])["text"].to_pylist()
        # Some rows may end with a line feed; each line of the file needs exactly one.
        text = "".join(row.removesuffix("\n") + "\n" for row in rows)
        (folder / f"wiki.{part}.tokens").write_text(text, encoding="utf-8")
