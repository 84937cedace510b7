"""Check images before they are decoded, and convert decoded ones to bytes of RGB."""

from __future__ import annotations

import struct
from typing import Any, TypeAlias

import numpy as np

from mlbench_core.errors import DatasetError, require

__all__ = [
    "MOST_BYTES",
    "MOST_PIXELS",
    "Box",
    "check_encoded",
    "check_pixels",
    "to_rgb",
    "without_ends",
]

Box: TypeAlias = tuple[int, int, int, int]
"""A part of an image: first row, first column, height and width."""

MOST_PIXELS = 89_478_485
"""Largest number of pixels of an image, 268 MB as RGB. Above it, Pillow warns of a bomb."""

MOST_BYTES = 1 << 28
"""Largest size of the file of an image."""

_MOST_RATIO = 32  # of the sides of an image whose ends are kept

_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8"
# ITU-T T.81, table B.1: markers of frames (all of 0xC0 to 0xCF but three), and markers without a
# length.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_ALONE = frozenset((0x01, *range(0xD0, 0xD9)))
_SCAN, _END = 0xDA, 0xD9


def check_encoded(name: str, encoded: bytes) -> None:
    """Refuse bytes that are not a JPEG or PNG image, or that have too many pixels or none.

    A decoder allocates the memory for all pixels that a header promises, so a file of some hundred
    bytes can ask for gigabytes. This function reads the header alone.

    Args:
        name: Path of the image, for messages.
        encoded: The content of its file.

    Raises:
        DatasetError: The image must not be decoded.

    Example:
        >>> header = b"\\x89PNG\\r\\n\\x1a\\n\\0\\0\\0\\rIHDR" + (10**5).to_bytes(4, "big") * 2
        >>> check_encoded("a.png", header)
        Traceback (most recent call last):
        mlbench_core.errors.DatasetError: a.png has 100000 x 100000 pixels, not 1 to 89478485: it \
is damaged or too large; get it again, make it smaller, or delete it
    """
    if encoded.startswith(_PNG) and encoded[12:16] == b"IHDR" and len(encoded) >= 24:
        width, height = struct.unpack_from(">II", encoded, 16)
    elif encoded.startswith(_JPEG):
        height, width = _jpeg_size(name, encoded)
    else:
        raise DatasetError(
            f"{name} is damaged: it is not a JPEG or PNG image, but begins with {encoded[:16]!r}; "
            "delete it and get it again"
        )
    check_pixels(name, height, width)


def check_pixels(name: str, height: int, width: int) -> None:
    """Refuse an image with more pixels than :data:`MOST_PIXELS`, or with none.

    Args:
        name: Path of the image, for messages.
        height: Its height.
        width: Its width.

    Raises:
        DatasetError: The image must not be decoded.
    """
    if not 1 <= height * width <= MOST_PIXELS:
        raise DatasetError(
            f"{name} has {width} x {height} pixels, not 1 to {MOST_PIXELS}: it is damaged or too "
            "large; get it again, make it smaller, or delete it"
        )


def without_ends(height: int, width: int) -> Box:
    """Return the middle of a very long image, and the whole of any other.

    For validation, an image is resized by its shorter side before its middle is cropped. One of 1 x
    20,000 pixels would become one of 256 x 5,120,000. The part that this function returns has the
    same middle. It is the whole image unless the longer side is at least 34 times the shorter one.

    Args:
        height: Height of the image, at least 1.
        width: Width of the image, at least 1.

    Returns:
        The part.

    Example:
        >>> without_ends(333, 500), without_ends(1, 20_000)
        ((0, 0, 333, 500), (0, 9984, 1, 32))
    """
    shorter = min(height, width)
    # Cut a multiple of the shorter side at each end, so that the pixels of the resized middle keep
    # their positions.
    top = max(0, (height // shorter - _MOST_RATIO) // 2) * shorter
    left = max(0, (width // shorter - _MOST_RATIO) // 2) * shorter
    return top, left, height - 2 * top, width - 2 * left


def _jpeg_size(name: str, encoded: bytes) -> tuple[int, int]:
    """Return height and width of the first frame."""
    at = len(_JPEG)
    # As in libjpeg, bytes between segments are skipped.
    while (at := encoded.find(b"\xff", at)) >= 0 and at + 4 <= len(encoded):
        marker = encoded[at + 1]
        if marker == 0xFF:  # any number of these may precede a marker
            at += 1
        elif marker == 0 or marker in _ALONE:
            at += 2
        elif marker in _FRAMES and at + 9 <= len(encoded):
            height, width = struct.unpack_from(">HH", encoded, at + 5)
            return height, width
        elif marker in (_SCAN, _END):
            break
        else:
            at += 2 + int.from_bytes(encoded[at + 2 : at + 4], "big")
    raise DatasetError(
        f"{name} is damaged: it is cut off, or has no header of a frame; delete it and get it again"
    )


def to_rgb(picture: Any) -> Any:
    """Convert a picture of Pillow to 8 bits of red, green and blue.

    Of 16 bits, the upper 8 are kept, as Pillow does itself for colors of 16 bits. ``convert`` alone
    would make every level of gray above 255 white.

    Args:
        picture: A ``PIL.Image.Image`` of any mode.

    Returns:
        One of mode ``"RGB"``; the picture itself if it has this mode.

    Raises:
        ValueError: The range of its levels is not known: floating point, or integers of 32 bits.
    """
    if picture.mode == "RGB":
        return picture
    # TIFF's integers of 32 bits have the mode "I"; for PNG and PGM it means 16 bits.
    if picture.mode == "F" or (picture.mode == "I" and picture.format == "TIFF"):
        raise ValueError(f"its levels have Pillow's mode {picture.mode!r}, not 8 or 16 bits")
    if picture.mode == "I" or picture.mode.startswith("I;16"):
        pictures: Any = require("PIL.Image", "vision")
        picture = pictures.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    return picture.convert("RGB")
