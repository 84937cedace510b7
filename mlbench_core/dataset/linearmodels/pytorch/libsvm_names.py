"""The data sets that are known by name: the addresses of their texts, and their contents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["KNOWN", "KnownDataset", "TextFile"]

_LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary/"
_XGBOOST = "https://raw.githubusercontent.com/dmlc/xgboost/379b29f0836b9dbc313b993d8e5743bd452d4117/demo/data/"
_LIBSVM_SOURCE = "https://raw.githubusercontent.com/cjlin1/libsvm/6b907139084abf2da4d6d3cb10dc3b7eaffa2fbb/"


@dataclass(frozen=True)
class TextFile:
    """A text on the network.

    Attributes:
        url: Address of the file.
        n_rows: Expected number of rows; it is compared with the rows read.
        sha256: Checksum of the downloaded file. None if no published checksum could be verified: then the number of
            rows, the number of features and the labels are checked instead.
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
        n_features: Number of columns, which may be larger than the largest index in one part.
        layout: Layout of the store: ``"dense"`` or ``"csr"``.
        labels: The negative and the positive label of the text; they become 0 and 1.
        files: The texts, by ``"train"`` and ``"test"``.
        note: A remark for users.
    """

    n_features: int
    layout: str
    labels: tuple[int, int]
    files: Mapping[str, TextFile]
    note: str = ""


KNOWN: Mapping[str, KnownDataset] = {
    "a9a": KnownDataset(
        123,
        "dense",
        (-1, 1),
        {"train": TextFile(_LIBSVM + "a9a", 32_561), "test": TextFile(_LIBSVM + "a9a.t", 16_281)},
        "Adult (UCI) as zeros and ones",
    ),
    "agaricus": KnownDataset(
        126,
        "dense",
        (0, 1),
        {
            "train": TextFile(
                _XGBOOST + "agaricus.txt.train",
                6_513,
                "915c2def06e9b44a306ad097fe8b6652c7c477d9c1e605bd2130ad20a70a8ad6",
            ),
            "test": TextFile(
                _XGBOOST + "agaricus.txt.test",
                1_611,
                "765db79391141953d890ce197fe828a621d6487fbba4de5e4d2217bd140371c0",
            ),
        },
        "Mushroom (UCI) as zeros and ones; separable",
    ),
    "australian": KnownDataset(
        14,
        "dense",
        (-1, 1),
        {"train": TextFile(_LIBSVM + "australian", 690)},
        "Statlog Australian Credit Approval (UCI), features not scaled",
    ),
    "duke": KnownDataset(
        7_129,
        "dense",
        (-1, 1),
        {"train": TextFile(_LIBSVM + "duke.tr.bz2", 38), "test": TextFile(_LIBSVM + "duke.val.bz2", 4)},
        "Duke breast cancer, gene expression",
    ),
    "epsilon": KnownDataset(
        2_000,
        "dense",
        (-1, 1),
        {
            "train": TextFile(_LIBSVM + "epsilon_normalized.bz2", 400_000),
            "test": TextFile(_LIBSVM + "epsilon_normalized.t.bz2", 100_000),
        },
        "PASCAL large-scale learning challenge 2008; about 12 GB of text, 3.2 GB stored",
    ),
    "heart_scale": KnownDataset(
        13,
        "dense",
        (-1, 1),
        {
            "train": TextFile(
                _LIBSVM_SOURCE + "heart_scale",
                270,
                "5defa0a4c4c5bdaf3f55ae3828310252e8565c13ee37ce279e0b86d82e7f4ce9",
            )
        },
        "Statlog Heart (UCI), scaled to [-1, 1]",
    ),
    "rcv1": KnownDataset(
        47_236,
        "csr",
        (-1, 1),
        {
            "train": TextFile(_LIBSVM + "rcv1_train.binary.bz2", 20_242),
            "test": TextFile(_LIBSVM + "rcv1_test.binary.bz2", 677_399),
        },
        "Reuters news, tf-idf",
    ),
    "webspam": KnownDataset(
        16_609_143,
        "csr",
        (-1, 1),
        {"train": TextFile(_LIBSVM + "webspam_wc_normalized_trigram.svm.xz", 350_000)},
        "web spam, trigrams; read it with layout='sparse_csr'",
    ),
}
