"""Describe the data sets of linear models that are known by name.

A description has the addresses of the texts, the sizes and the labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mlbench_core.dataset.local_files import COMPRESSIONS

__all__ = ["KNOWN", "SYNTHETIC", "KnownDataset", "TextFile", "has_stores", "text_names"]

SYNTHETIC = "synthetic_dense"
"""The data set that is generated, so that it has no text."""

_LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary/"
# The next two addresses have fixed revisions, so that the checksums below stay correct.
_XGBOOST = (
    "https://raw.githubusercontent.com/dmlc/xgboost/379b29f0836b9dbc313b993d8e5743bd452d4117/"
    "demo/data/"
)
_LIBSVM_SOURCE = (
    "https://raw.githubusercontent.com/cjlin1/libsvm/6b907139084abf2da4d6d3cb10dc3b7eaffa2fbb/"
)
_AGARICUS_SHA256 = (
    "915c2def06e9b44a306ad097fe8b6652c7c477d9c1e605bd2130ad20a70a8ad6",
    "765db79391141953d890ce197fe828a621d6487fbba4de5e4d2217bd140371c0",
)
_HEART_SHA256 = "5defa0a4c4c5bdaf3f55ae3828310252e8565c13ee37ce279e0b86d82e7f4ce9"


@dataclass(frozen=True)
class TextFile:
    """A text that can be downloaded.

    Attributes:
        url: Address of the file.
        n_rows: Expected number of rows, which is compared with the number of rows of the converted
            text.
        sha256: Checksum of the downloaded file. None if no published checksum could be verified;
            the number of rows, the number of features and the labels are then checked instead.
    """

    url: str
    n_rows: int
    sha256: str | None = None

    @property
    def file_name(self) -> str:
        """Return the last part of the address."""
        return self.url.rsplit("/", 1)[1]


@dataclass(frozen=True)
class KnownDataset:
    """A data set for binary classification.

    Attributes:
        title: Short description.
        n_features: Number of columns, which may be larger than the largest index in one part.
        files: The texts, by ``"train"`` and ``"test"``.
        layout: Layout of the store: ``"dense"`` or ``"csr"``.
        labels: The negative and the positive label of the text; they become 0 and 1.
        license: License of the data as its sources state it; "unknown" if nobody has checked it.
        download_bytes: Size of all texts as they are downloaded; None if it is unknown.
    """

    title: str
    n_features: int
    files: Mapping[str, TextFile]
    layout: str = "dense"
    labels: tuple[int, int] = (-1, 1)
    license: str = "unknown"
    download_bytes: int | None = None


def _parts(train: TextFile, test: TextFile) -> dict[str, TextFile]:
    return {"train": train, "test": test}


KNOWN: Mapping[str, KnownDataset] = {
    "a9a": KnownDataset(
        "Adult (UCI) as zeros and ones",
        123,
        _parts(TextFile(_LIBSVM + "a9a", 32_561), TextFile(_LIBSVM + "a9a.t", 16_281)),
        license="none stated",
    ),
    # The two parts are separable by a plane.
    "agaricus": KnownDataset(
        "Mushroom (UCI) as zeros and ones",
        126,
        _parts(
            TextFile(_XGBOOST + "agaricus.txt.train", 6_513, _AGARICUS_SHA256[0]),
            TextFile(_XGBOOST + "agaricus.txt.test", 1_611, _AGARICUS_SHA256[1]),
        ),
        labels=(0, 1),
        license="none stated",
        download_bytes=925_868,
    ),
    "australian": KnownDataset(
        "Statlog Australian Credit Approval (UCI), not scaled",
        14,
        {"train": TextFile(_LIBSVM + "australian", 690)},
        license="none stated",
    ),
    "duke": KnownDataset(
        "Duke breast cancer, gene expression",
        7_129,
        _parts(TextFile(_LIBSVM + "duke.tr.bz2", 38), TextFile(_LIBSVM + "duke.val.bz2", 4)),
    ),
    # About 12 GB of text, 3.2 GB stored
    "epsilon": KnownDataset(
        "PASCAL large-scale learning challenge 2008",
        2_000,
        _parts(
            TextFile(_LIBSVM + "epsilon_normalized.bz2", 400_000),
            TextFile(_LIBSVM + "epsilon_normalized.t.bz2", 100_000),
        ),
    ),
    "heart_scale": KnownDataset(
        "Statlog Heart (UCI), scaled to [-1, 1]",
        13,
        {"train": TextFile(_LIBSVM_SOURCE + "heart_scale", 270, _HEART_SHA256)},
        license="none stated",
        download_bytes=27_670,
    ),
    "rcv1": KnownDataset(
        "Reuters news, tf-idf",
        47_236,
        _parts(
            TextFile(_LIBSVM + "rcv1_train.binary.bz2", 20_242),
            TextFile(_LIBSVM + "rcv1_test.binary.bz2", 677_399),
        ),
        layout="csr",
    ),
    # A dense batch has 66 MB per row: read it with layout="sparse_csr".
    "webspam": KnownDataset(
        "Web spam, trigrams",
        16_609_143,
        {"train": TextFile(_LIBSVM + "webspam_wc_normalized_trigram.svm.xz", 350_000)},
        layout="csr",
    ),
}


def text_names(name: str, part: str) -> list[str]:
    """Return the names that the text of one part of a data set may have.

    The names do not have the ending of a compression.

    Args:
        name: Name of the data set, known or not.
        part: ``"train"`` or ``"test"``.

    Returns:
        The published name, if the data set is known, and then ``NAME`` for training or ``NAME.t``
        for test.

    Example:
        >>> text_names("epsilon", "test"), text_names("mine", "train")
        (['epsilon_normalized.t', 'epsilon.t'], ['mine'])
    """
    names = []
    if name in KNOWN and part in KNOWN[name].files:
        published = PurePosixPath(KNOWN[name].files[part].file_name)
        is_compressed = published.suffix in COMPRESSIONS[1:]
        names.append(published.stem if is_compressed else published.name)
    names.append(name if part == "train" else f"{name}.t")
    # The published name may be one of these: a9a.t, for example.
    return list(dict.fromkeys(names))


def has_stores(folder: Path, name: str, part: str) -> bool:
    """Return True if a folder has stores of one part; unlike reading them, this needs no framework.

    Args:
        folder: The folder.
        name: Name of the data set.
        part: ``"train"`` or ``"test"``.
    """
    stem = f"{name}_{part}"
    return (folder / f"{stem}.lmdb").exists() or any(folder.glob(f"{stem}-*.lmdb"))
