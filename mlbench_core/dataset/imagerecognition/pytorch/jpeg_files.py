"""Find labeled JPEG images in folders or in tar files, and read them by their position.

A folder of images is one of these. They can be read only: nothing is unpacked or written.

* One folder for each class, as in ImageNet's training set: ``n01440764/n01440764_10026.JPEG``.
* ImageNet's validation set as it is published: images without folders,
  ``ILSVRC2012_val_00000001.JPEG``. Their classes are in ``LOC_val_solution.csv``, the file of the
  competition's data, in the parent of the folder.
* Uncompressed tar files (shards). A member's class is the content of the member ``NAME.cls``, as in
  WebDataset. Without one it is the folder of the member in the tar file. Without a folder it is
  that of the table above, or else the name of the tar file. So ImageNet's tar file for each class,
  ``n01440764.tar``, can be read, too.

The order is that of the classes, then of the names, so images have the same positions in folders
and in tar files.

References:
    Russakovsky et al., ImageNet Large Scale Visual Recognition Challenge, arXiv:1409.0575.
"""

from __future__ import annotations

import copy
import csv
import os
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from mlbench_core.dataset.imagerecognition.pytorch.decoding import MOST_BYTES
from mlbench_core.errors import DatasetError, DatasetNotFoundError
from mlbench_core.files import read_bytes

__all__ = ["JpegFiles", "find_jpegs"]

_ENDINGS = (".jpg", ".jpeg")
_SOLUTION = "LOC_val_solution.csv"
_CLASS_BYTES = 256  # a longer .cls is not the name of a class


class _Members(NamedTuple):
    """The places of images in tar files, with one entry of each array per image.

    Attributes:
        archives: Paths of the tar files.
        archive: Position in ``archives``.
        offset: Position of the first byte in the tar file.
        size: Number of bytes.
    """

    archives: tuple[Path, ...]
    archive: np.ndarray
    offset: np.ndarray
    size: np.ndarray


class _Image(NamedTuple):
    """The class and the path of an image, and its position if it is in a tar file."""

    label: str
    name: str
    archive: int = 0
    offset: int = 0
    size: int = 0


class JpegFiles:
    """Labeled JPEG images, which are read by their position. Make it with :func:`find_jpegs`.

    The index is in arrays, so that millions of images need few bytes, and processes share it after
    a fork.

    Attributes:
        classes: Names of the classes, sorted; names that are all numbers are in numerical order.
        targets: Class of each image, int64 of shape (N,).

    Args:
        root: Folder to which the names are relative.
        found: The images in any order, at least one.
        archives: Paths of the tar files that have the images; None if they are files.
    """

    def __init__(
        self, root: Path, found: Sequence[_Image], archives: Sequence[Path] | None = None
    ) -> None:
        self.root = root
        labels = {image.label for image in found}
        # WebDataset's shards have numbers: as texts, 10 would come before 2.
        if all(map(str.isdecimal, labels)):
            self.classes = sorted(labels, key=int)
        else:
            self.classes = sorted(labels)
        numbers = {label: number for number, label in enumerate(self.classes)}
        images = sorted(found, key=lambda image: (numbers[image.label], image.name))
        self.targets = np.array([numbers[image.label] for image in images], dtype=np.int64)
        self._names = np.array([os.fsencode(image.name) for image in images])
        self._members: _Members | None = None
        if archives is not None:
            positions = [(image.archive, image.offset, image.size) for image in images]
            # Each of the three columns is contiguous after the copy.
            archive, offset, size = np.array(positions, dtype=np.int64).T.copy()
            self._members = _Members(tuple(archives), archive, offset, size)

    def __len__(self) -> int:
        return len(self.targets)

    def name(self, index: int) -> str:
        """Return the path of an image, for messages."""
        name = os.fsdecode(bytes(self._names[index]))
        if self._members is None:
            return str(self.root / name)
        return f"{name} in {self._members.archives[self._members.archive[index]]}"

    def read(self, index: int) -> bytes:
        """Return the bytes of an image as they are stored.

        Args:
            index: Its position.

        Raises:
            DatasetError: The file cannot be read, is not a regular file, or has become shorter.
        """
        try:
            if self._members is None:
                return read_bytes(self.root / os.fsdecode(bytes(self._names[index])), MOST_BYTES)
            size = int(self._members.size[index])
            archive = self._members.archives[self._members.archive[index]]
            with archive.open("rb", buffering=0) as file:
                content = os.pread(file.fileno(), size, int(self._members.offset[index]))
        except OSError as error:
            raise DatasetError(f"{self.name(index)} cannot be read: {error}") from error
        if len(content) != size:
            raise DatasetError(
                f"{self.name(index)} has {len(content)} bytes, not {size}: the tar file has changed"
            )
        return content

    def select(self, positions: Sequence[int] | np.ndarray) -> JpegFiles:
        """Return some of the images, with the classes of all.

        Args:
            positions: Their positions, in the order of the result.
        """
        selected = copy.copy(self)
        selected.targets, selected._names = self.targets[positions], self._names[positions]
        if self._members is not None:
            archives, archive, offset, size = self._members
            selected._members = _Members(
                archives, archive[positions], offset[positions], size[positions]
            )
        return selected

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self)} images of {len(self.classes)} classes in "
            f"{self.root})"
        )


def find_jpegs(root: str | os.PathLike[str], part: str = "") -> JpegFiles:
    """Find the JPEG images of a folder; the module describes the forms of such a folder.

    Files and members with other endings than ``.jpg`` and ``.jpeg``, in upper or lower case, are
    ignored. Every tar file is read once from header to header, without its images.

    Args:
        root: Folder of the data set.
        part: ``"train"`` or ``"val"``: the images are in the folder of this name below the root, or
            in tar files in it, or in tar files in the root whose names begin with it. Empty for
            images in the root itself.

    Returns:
        The images, at least one.

    Raises:
        DatasetNotFoundError: There are no such images.
        DatasetError: A tar file is damaged or compressed, a member with the name of an image is not
            a regular file, the class of an image is not known, or a class has no image.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as root:
        ...     for name in ("cat/2.jpg", "ant/1.JPEG"):
        ...         path = Path(root, "train", name)
        ...         path.parent.mkdir(parents=True)
        ...         _ = path.write_bytes(b"...")
        ...     images = find_jpegs(root, "train")
        ...     len(images), images.classes, images.read(1)
        (2, ['ant', 'cat'], b'...')
    """
    root = Path(root)
    folder = root / part
    archives = sorted(folder.glob("*.tar"))
    if part:
        archives += sorted(filter(Path.is_file, root.glob(f"{part}*.tar")))
    if not folder.is_dir() and not archives:
        tars = f", nor do tar files {root / part}*.tar" if part else ""
        raise DatasetNotFoundError(
            f"{folder} does not exist{tars}: put one folder of JPEG images for each class there "
            "(for ImageNet see https://image-net.org/download)"
        )
    solution = _read_solution(root)
    if archives and folder.is_dir() and any(map(Path.is_dir, folder.glob("[!.]*"))):
        raise DatasetError(
            f"{archives[0]} is beside folders in {folder}: move the tar files or the folders away"
        )
    images: list[_Image] = []
    for number, path in enumerate(archives):
        images += _scan_archive(path, number, solution)
    if not archives:
        images = _scan_folder(folder, solution)
    if not images:
        where = ", ".join(map(str, archives[:3])) or folder
        raise DatasetNotFoundError(
            f"no JPEG images in {where}: their names must end with .jpg, .jpeg or .JPEG"
        )
    return JpegFiles(folder, images, archives or None)


def _read_solution(root: Path) -> dict[str, str]:
    """Return the class of each image of ImageNet's validation set; empty without the file."""
    path = root / _SOLUTION
    if not path.is_file():
        return {}
    try:
        # Spreadsheet programs write a byte order mark.
        with path.open(encoding="utf-8-sig", newline="") as file:
            solution = {}
            for row in csv.DictReader(file):
                # "ILSVRC2012_val_00000001,n01751748 111 108 ...": a class, and boxes.
                solution[row["ImageId"]] = row["PredictionString"].split()[0]
            return solution
    except (KeyError, IndexError, AttributeError, UnicodeDecodeError, csv.Error) as error:
        raise DatasetError(
            f"{path} is damaged: it does not have the columns ImageId and PredictionString; "
            "delete it and get it again"
        ) from error


def _is_image(name: str) -> bool:
    return name.lower().endswith(_ENDINGS)


def _scan_folder(folder: Path, solution: Mapping[str, str]) -> list[_Image]:
    """Return the images in the folders of the classes, and those that the solution has."""
    images: list[_Image] = []
    try:
        with os.scandir(folder) as entries:
            visible = [entry for entry in entries if not entry.name.startswith(".")]
        for entry in visible:
            if entry.is_dir():
                names = list(filter(_is_image, os.listdir(entry)))
                # Without an error, the other classes would get other numbers.
                if not names:
                    raise DatasetError(
                        f"{entry.path} has no JPEG images of the class {entry.name}: delete it "
                        "if it is empty"
                    )
                for name in names:
                    images.append(_Image(entry.name, f"{entry.name}/{name}"))
            elif _is_image(entry.name):
                stem = entry.name.rpartition(".")[0]
                if stem not in solution:
                    raise DatasetError(
                        f"the class of {entry.path} is not known: put images into one folder "
                        f"for each class, or {_SOLUTION} of ImageNet into {folder.parent}"
                    )
                images.append(_Image(solution[stem], entry.name))
    except OSError as error:
        raise DatasetError(f"{folder} cannot be read: {error}") from error
    return images


def _scan_archive(path: Path, number: int, solution: Mapping[str, str]) -> list[_Image]:
    """Return the images of a tar file."""
    labels: dict[str, str] = {}
    members: list[tuple[str, tarfile.TarInfo]] = []
    try:
        # "r:" refuses compressed files, in which no position can be read without those before it.
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                base, ending = os.path.splitext(member.name)
                is_class = ending == ".cls"
                if member.isdir() or not (is_class or _is_image(ending)):
                    continue
                # A link would lead out of the archive, and a sparse file has its bytes elsewhere.
                if not member.isreg() or member.issparse() or member.size < 0:
                    raise DatasetError(
                        f"{member.name} in {path} is a link or a device, not a regular file"
                    )
                if is_class:
                    labels[base] = _read_class(archive, member, path)
                else:
                    members.append((base, member))
            _check_end(archive, path)
    # Wrong numbers in headers raise a ValueError.
    except (tarfile.TarError, OSError, ValueError) as error:
        raise DatasetError(
            f"{path} is damaged, or is not an uncompressed tar file: {error}; decompress it, "
            "or get it again"
        ) from error

    images = []
    for base, member in members:
        parts = PurePosixPath(base)
        # The docstring of the module describes this order.
        label = labels.get(base) or parts.parent.name or solution.get(parts.name) or path.stem
        images.append(_Image(label, member.name, number, member.offset_data, member.size))
    return images


def _read_class(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> str:
    """Return the content of a member ``NAME.cls``."""
    label = ""
    if member.size <= _CLASS_BYTES and (stream := archive.extractfile(member)):
        label = stream.read().decode("utf-8-sig", errors="replace").strip()
    if not label:
        raise DatasetError(
            f"{member.name} in {path} does not have the name or the number of a class in one line"
        )
    return label


def _check_end(archive: tarfile.TarFile, path: Path) -> None:
    """Refuse a tar file with a damaged header in the middle."""
    # tarfile stops there as at the end, without an error.
    with path.open("rb") as file:
        file.seek(archive.offset)
        # The end is a block of zeros, or that of the file.
        if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
            raise tarfile.ReadError(f"there is no header at byte {archive.offset}")
