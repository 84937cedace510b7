"""The data sets that the library knows: their licenses, sources, sizes, checksums and folders.

Each value is one that its publisher states, or that was measured on a verified copy. A value that
nobody has verified is "unknown" or None. The classes that read a data set take their addresses and
checksums from here. This module imports no framework.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mlbench_core.dataset.libsvm_names import KNOWN, SYNTHETIC, text_names
from mlbench_core.dataset.local_files import find_file
from mlbench_core.paths import user_folder
from mlbench_core.tasks import TASKS

__all__ = [
    "DATASETS",
    "DEFAULT_FOLDER",
    "Archive",
    "DataFile",
    "DatasetRecord",
    "FileForm",
    "get_dataset",
]

DEFAULT_FOLDER = ("datasets", "torch")
"""The parent of all default folders, below the user's folder.

Tasks without ``--root-dataset`` use it too.
"""

CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
CIFAR10_ARCHIVE_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
CIFAR10_BATCHES = (*map("data_batch_{}".format, range(1, 6)), "test_batch")
# The folders into which the two archives unpack.
CIFAR10_FOLDERS = ("", "cifar-10-batches-bin", "cifar-10-batches-py")
# The published checksums. No verifiable checksum of the other binary batches is published, so their
# number of records is checked instead.
CIFAR10_MD5 = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
# Of the binary version: a label and an image in each record.
_CIFAR10_BATCH_BYTES = 10_000 * (1 + 3 * 32 * 32)

MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
MNIST_FOLDERS = ("", "raw", "MNIST/raw")
# Each file has two checksums. That of the decompressed content is valid for any compression. That
# of the archive detects a damaged download before the file gets its final name.
MNIST_MD5 = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
MNIST_ARCHIVE_MD5 = {
    "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
}

WIKITEXT2_URL = "https://wikitext.smerity.com/wikitext-2-v1.zip"
WIKITEXT2_HUB_URL = (
    "https://huggingface.co/datasets/Salesforce/wikitext/resolve/main/wikitext-2-v1/"
    "{name}-00000-of-00001.parquet"
)
WIKITEXT2_TOKENS = {"train": 2_088_628, "valid": 217_646, "test": 245_569}
WIKITEXT2_WORDS = 33_278
WIKITEXT2_FOLDERS = ("", "wikitext-2")  # the archive unpacks to the second
WIKITEXT2_NAMES = ("wiki.{part}.tokens", "{part}.txt")

FINEWEB10B_URL = "https://huggingface.co/datasets/kjj0/fineweb10B-gpt2"
FINEWEB10B_FILE_URL = FINEWEB10B_URL + "/resolve/main/{name}"
FINEWEB10B_SHARDS = 103  # of the training part; the validation part has one more

# The address has a fixed revision, so that the checksums below stay correct.
MULTI30K_URL = (
    "https://raw.githubusercontent.com/multi30k/dataset/a3d2e0d26b56f3846f66a952536ffed4e401d05a/"
    "data/task1/raw/"
)
MULTI30K_NAMES = {
    "train": ("train",),
    "validation": ("val", "validation"),
    "test": ("test_2016_flickr", "test"),
}
MULTI30K_SHA256 = {
    "train.en": "460a15fbd157e34a7a9957ee388c1ca247fe47af3ef25fb50442af6c274e0fc6",
    "train.de": "2c2b73fd2b548fbcde3a875e0a78d6ee94d498bfdee6bd3eae3945779e9ddf72",
    "val.en": "1f2a23d992769b5b3d209b0a10dd0b77c08cceb1f20dfb97ed0aafa49d107227",
    "val.de": "660e09eb7e1da2f856ea13ee5ad3cf6d36b3d5b0b733c857e94c5747a3dfc660",
    "test_2016_flickr.en": "399a4382932c1aadd3ceb9bef1008d388a64c76d4ae4e9d4728c6f4301cac182",
    "test_2016_flickr.de": "4be6b5b3236b79c25475c6bb829800a7ce559e9ba7a1f6c2394fe4d40be46d16",
}
MULTI30K_ARCHIVE_SHA256 = {
    "train.en": "d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f",
    "train.de": "726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6",
    "val.en": "14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28",
    "val.de": "f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a",
    "test_2016_flickr.en": "611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9",
    "test_2016_flickr.de": "9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8",
}


@dataclass(frozen=True)
class Archive:
    """Text in an archive on a server.

    Attributes:
        url: Address of a tar archive.
        member: Path of the text in the archive, with ``{lang}`` for ``en`` or ``de`` and ``{side}``
            for ``src`` or ``ref``.
        lines: Number of lines in each language, which is checked because no checksums are
            published.
    """

    url: str
    member: str
    lines: int

    def text_path(self, lang: str) -> str:
        """Return the path of the text in one language in the archive."""
        # In newstest2014's files, English is the source and German the reference translation.
        return self.member.format(lang=lang, side={"en": "src", "de": "ref"}.get(lang, ""))


# The publishers give no checksums; the last number of each archive is its number of lines, which is
# checked instead.
EUROPARL = Archive(
    "https://www.statmt.org/europarl/v7/de-en.tgz", "europarl-v7.de-en.{lang}", 1_920_209
)
COMMON_CRAWL = Archive(
    "https://www.statmt.org/wmt13/training-parallel-commoncrawl.tgz",
    "commoncrawl.de-en.{lang}",
    2_399_123,
)
NEWSTEST2013 = Archive(
    "https://data.statmt.org/wmt17/translation-task/dev.tgz", "dev/newstest2013.{lang}", 3_000
)
NEWSTEST2014 = Archive(
    "https://www.statmt.org/wmt14/test-full.tgz",
    "test-full/newstest2014-deen-{side}.{lang}.sgm",
    3_003,
)
_NEWS_11 = Archive(
    "https://data.statmt.org/wmt16/translation-task/training-parallel-nc-v11.tgz",
    "training-parallel-nc-v11/news-commentary-v11.de-en.{lang}",
    242_770,
)
_NEWS_12 = Archive(
    "https://data.statmt.org/wmt17/translation-task/training-parallel-nc-v12.tgz",
    "training/news-commentary-v12.de-en.{lang}",
    270_769,
)
# Europarl, Common Crawl and newstest2014 are in both data sets, so both can share a folder and a
# download.
WMT16_ARCHIVES = {"train": (EUROPARL, COMMON_CRAWL, _NEWS_11), "validation": (NEWSTEST2014,)}
WMT17_ARCHIVES = {
    "train": (EUROPARL, COMMON_CRAWL, _NEWS_12),
    "validation": (NEWSTEST2013,),
    "test": (NEWSTEST2014,),
}


@dataclass(frozen=True)
class FileForm:
    """One form in which a file of a data set may be on the disk, and the property that is checked.

    The property is that of the decompressed content, so that it is valid for any compression.

    Attributes:
        path: Path below the folder of the data set, without the ending of a compression.
        check: ``"sha256"`` or ``"md5"`` if a checksum is published, otherwise ``"bytes"``,
            ``"lines"`` or ``"tokens"``: the number of these. Tokens are words, plus one end for
            each line. ``"shard"`` is the version of a shard of tokens whose size is the one in its
            header.
        expected: The checksum in hexadecimal digits, or the number.
    """

    path: str
    check: str
    expected: str | int


@dataclass(frozen=True)
class DataFile:
    """A file of a data set.

    Attributes:
        name: For example ``"test_batch"``.
        forms: The forms in which it may exist, in the order in which they are searched.
    """

    name: str
    forms: tuple[FileForm, ...]

    def find(self, folder: Path) -> tuple[Path, FileForm] | None:
        """Return the path of the file, plain or compressed, and its form, or None.

        Args:
            folder: Folder of the data set.
        """
        for form in self.forms:
            if path := find_file([folder], [form.path]):
                return path, form
        return None


@dataclass(frozen=True)
class DatasetRecord:
    """The description of a data set.

    Attributes:
        name: Name in commands and options, for example ``"cifar10"``.
        title: Short description.
        license: License as the sources of the data state it; "unknown" if nobody has checked it.
        sources: Addresses of the data; or one text that says where it comes from.
        download_bytes: Size of the download, rounded if its publisher rounds it; 0 without a
            download, None if unknown.
        files: The published files that training and validation need.
        origin: ``"download"``; ``"installed"`` with a package; ``"generated"``; or ``"by hand"`` if
            only a person can get it.
    """

    name: str
    title: str
    license: str
    sources: tuple[str, ...]
    download_bytes: int | None = None
    files: tuple[DataFile, ...] = ()
    origin: str = "download"

    @property
    def tasks(self) -> tuple[str, ...]:
        """Return the keys of the tasks that have a goal on this data set.

        Example:
            >>> get_dataset("multi30k").tasks, get_dataset("duke").tasks
            (('4a', '4b'), ())
        """
        return tuple(task.key for task in TASKS.values() if self.name in task.datasets)

    @property
    def folder(self) -> Path:
        """Return the default folder.

        Its first task reads this folder without ``--data`` and ``--root-dataset``.
        """
        name = f"task{self.tasks[0]}" if self.tasks else self.name
        return user_folder(*DEFAULT_FOLDER, name)

    @property
    def checks(self) -> tuple[str, ...]:
        """Return the kinds of checks of its files, see :class:`FileForm`.

        Example:
            >>> get_dataset("mnist").checks
            ('md5',)
        """
        return tuple(sorted({form.check for file in self.files for form in file.forms}))


def get_dataset(name: str) -> DatasetRecord:
    """Look a data set up by its name.

    Args:
        name: For example ``"cifar10"``.

    Returns:
        Its description.

    Raises:
        ValueError: The name is unknown; the message lists the known ones.

    Example:
        >>> get_dataset("wmt17").download_bytes
        1600000000
    """
    if name not in DATASETS:
        raise ValueError(f"name must be one of {', '.join(sorted(DATASETS))}, not {name!r}")
    return DATASETS[name]


def _cifar_batch(name: str) -> DataFile:
    forms = []
    for folder in CIFAR10_FOLDERS:
        for file_name in (f"{name}.bin", name):
            path = f"{folder}/{file_name}".lstrip("/")
            if md5 := CIFAR10_MD5.get(file_name):
                forms.append(FileForm(path, "md5", md5))
            else:
                forms.append(FileForm(path, "bytes", _CIFAR10_BATCH_BYTES))
    return DataFile(name, tuple(forms))


def _wikitext_part(part: str) -> DataFile:
    forms = []
    for folder in WIKITEXT2_FOLDERS:
        for name in WIKITEXT2_NAMES:
            path = f"{folder}/{name.format(part=part)}".lstrip("/")
            forms.append(FileForm(path, "tokens", WIKITEXT2_TOKENS[part]))
    return DataFile(part, tuple(forms))


def _fineweb_shards() -> tuple[DataFile, ...]:
    """Return the validation part first, so that a first part of the files has both parts."""
    names = ["fineweb_val_000000.bin"]
    for number in range(1, FINEWEB10B_SHARDS + 1):
        names.append(f"fineweb_train_{number:06d}.bin")
    # No checksums are published in a form that could be copied here.
    return tuple(DataFile(name, (FileForm(name, "shard", 1),)) for name in names)


def _wmt_files(archives: Mapping[str, tuple[Archive, ...]]) -> tuple[DataFile, ...]:
    """Return the texts of all archives; the test sets are also known by their plain names."""
    files = []
    for archive in itertools.chain.from_iterable(archives.values()):
        for lang in ("en", "de"):
            path = archive.text_path(lang)
            forms = [FileForm(path, "lines", archive.lines)]
            for test_set in ("newstest2013", "newstest2014"):
                if test_set in path:
                    forms.insert(0, FileForm(f"{test_set}.{lang}", "lines", archive.lines))
            files.append(DataFile(path.rsplit("/", 1)[-1], tuple(forms)))
    return tuple(files)


def _wmt(name: str, title: str, archives: Mapping[str, tuple[Archive, ...]]) -> DatasetRecord:
    urls = tuple(archive.url for archive in itertools.chain.from_iterable(archives.values()))
    terms = "unknown (test sets: for research)"
    return DatasetRecord(name, title, terms, urls, 1_600_000_000, _wmt_files(archives))


def _linear(name: str) -> DatasetRecord:
    data = KNOWN[name]
    files = []
    for part, text in data.files.items():
        names = text_names(name, part)
        check: tuple[str, str | int] = ("lines", text.n_rows)
        # A checksum is that of the published file, so it is that of the content only if the file is
        # not compressed.
        if text.sha256 is not None and names[0] == text.file_name:
            check = ("sha256", text.sha256)
        files.append(DataFile(part, tuple(FileForm(path, *check) for path in names)))
    urls = tuple(text.url for text in data.files.values())
    return DatasetRecord(name, data.title, data.license, urls, data.download_bytes, tuple(files))


def _mnist_file(name: str) -> DataFile:
    forms = []
    for folder in MNIST_FOLDERS:
        forms.append(FileForm(f"{folder}/{name}".lstrip("/"), "md5", MNIST_MD5[name]))
    return DataFile(name, tuple(forms))


def _multi30k_file(name: str) -> DataFile:
    return DataFile(name, (FileForm(name, "sha256", MULTI30K_SHA256[name]),))


def _urls(folder: str, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{folder}{name}.gz" for name in names)


_RECORDS = (
    DatasetRecord(
        "cifar10",
        "CIFAR-10: color images of 32x32 in ten classes",
        "none stated",
        (CIFAR10_URL,),
        162_000_000,
        tuple(map(_cifar_batch, CIFAR10_BATCHES)),
    ),
    DatasetRecord(
        "mnist",
        "MNIST: handwritten digits, 28x28",
        "none stated; commonly CC BY-SA 3.0",
        _urls(MNIST_URL, MNIST_MD5),
        11_594_722,
        tuple(map(_mnist_file, MNIST_MD5)),
    ),
    DatasetRecord(
        "digits",
        "Handwritten digits of scikit-learn, 8x8",
        "unknown",
        ("scikit-learn",),
        0,
        origin="installed",
    ),
    DatasetRecord(
        "imagenet",
        "ImageNet, or images in one folder for each class",
        "unknown",
        ("https://image-net.org/download",),
        origin="by hand",
    ),
    *map(_linear, KNOWN),
    DatasetRecord(
        SYNTHETIC,
        "Dense rows of a logistic model",
        "not applicable",
        ("this library",),
        0,
        origin="generated",
    ),
    DatasetRecord(
        "wikitext2",
        "WikiText-2: articles of Wikipedia, in words",
        "CC BY-SA",
        (
            WIKITEXT2_URL,
            WIKITEXT2_HUB_URL.format(name="train"),
            WIKITEXT2_HUB_URL.format(name="validation"),
            WIKITEXT2_HUB_URL.format(name="test"),
        ),
        4_000_000,
        tuple(map(_wikitext_part, WIKITEXT2_TOKENS)),
    ),
    DatasetRecord(
        "fineweb10b",
        "FineWeb: web pages in English, the first 10 billion of GPT-2's tokens in shards",
        "ODC-By 1.0",
        (FINEWEB10B_URL,),
        20_000_000_000,
        _fineweb_shards(),
    ),
    _wmt(
        "wmt16",
        "WMT16 English-German: Europarl, Common Crawl, News Commentary 11",
        WMT16_ARCHIVES,
    ),
    _wmt(
        "wmt17",
        "WMT17 English-German: Europarl, Common Crawl, News Commentary 12",
        WMT17_ARCHIVES,
    ),
    DatasetRecord(
        "multi30k",
        "Multi30k: captions of photos, English-German",
        "research and education, non-commercial",
        _urls(MULTI30K_URL, MULTI30K_SHA256),
        1_296_271,
        tuple(map(_multi30k_file, MULTI30K_SHA256)),
    ),
)

DATASETS: Mapping[str, DatasetRecord] = {record.name: record for record in _RECORDS}
"""All data sets by name."""
