"""Check the pages of an LMDB file before LMDB reads it.

LMDB follows the page numbers and sizes in its file without checking all of them. A damaged one can
point outside the file, and the process is then ended by a bus error, without a message. The
functions here follow the same numbers and read the index alone: for data of linear models, some
pages for each gigabyte.

The layout, for 64-bit little-endian machines (``mdb.c`` of LMDB 0.9)::

    page        number u64, padding u16, flags u16, lower u16, upper u16,
                then the offsets of its nodes, u16 each
    meta        at 16: magic u32, version u32, address u64, map size u64, two databases,
                last page u64, transaction u64
    databases   48 bytes each: page size u32 (of the first one only), flags u16, depth u16,
                four counts u64, root u64
    node        low u16, high u16, flags u16, size of the key u16, key, data

In a branch, low, high and flags of a node are the number of the page below. In a leaf, low and high
are the size of the data, which may be on other pages.
"""

from __future__ import annotations

import os
import struct
import sys
from pathlib import Path

from mlbench_core.errors import DatasetError

__all__ = ["check_pages"]

_MAGIC, _VERSION = 0xBEEFC0DE, 1
_BRANCH, _LEAF, _META = 1, 2, 8
_ELSEWHERE = 1  # flag of a node whose data is on separate pages
_NO_PAGE = 2**64 - 1  # root of an empty database
_HEADER_BYTES = 16
_NODE = struct.Struct("<HHHH")
_META_FIELDS = struct.Struct("<II8x8xI44x4xH2x8x8x8x8xQQQ")
_MOST_LEVELS = 32
_PAGE_SIZES = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


def check_pages(file: Path) -> None:
    """Refuse an LMDB file with a page number or a size that leads outside of the file or of a page.

    The content of values is not checked.

    Args:
        file: The file.

    Raises:
        DatasetError: The file is cut off, damaged, or not an LMDB.
    """
    # The layout depends on the machine. Other machines rely on the checks of LMDB itself.
    if sys.byteorder != "little" or sys.maxsize < 1 << 32:
        return
    with file.open("rb", buffering=0) as opened:
        _Pages(file, opened.fileno()).check()


class _Pages:
    """The index of an open LMDB file."""

    def __init__(self, file: Path, descriptor: int) -> None:
        self.file, self.descriptor = file, descriptor
        self.page_bytes = 0
        self.last = 0

    def check(self) -> None:
        """Check both descriptions of the file, and the index that the newer one belongs to."""
        root, self.last, transaction = self._meta(0)
        other_root, other_last, other_transaction = self._meta(self.page_bytes)
        # LMDB writes the two descriptions in turns, so the larger transaction is the newer one.
        if other_transaction > transaction:
            root, self.last = other_root, other_last
        size, needed = os.fstat(self.descriptor).st_size, (self.last + 1) * self.page_bytes
        if size < needed:
            raise DatasetError(
                f"{self.file} is cut off: it has {size} of {needed} bytes; convert or copy it again"
            )
        # Each page has one parent, so a page that comes again would be a circle.
        seen: set[int] = set()
        level = [] if root == _NO_PAGE else [root]
        for _ in range(_MOST_LEVELS):
            if not level:
                return
            below: list[int] = []
            for number in level:
                self._require(number not in seen, f"page {number} occurs twice")
                seen.add(number)
                below += self._children(number)
            level = below
        self._require(not level, "its index is too deep")

    def _meta(self, offset: int) -> tuple[int, int, int]:
        """Return root, last page and transaction's number from the description at an offset."""
        page = os.pread(self.descriptor, _HEADER_BYTES + _META_FIELDS.size, offset)
        if len(page) < _HEADER_BYTES + _META_FIELDS.size:
            raise DatasetError(f"{self.file} cannot be read as an LMDB: it is too short")
        magic, version, page_bytes, flags, root, last, transaction = _META_FIELDS.unpack_from(
            page, _HEADER_BYTES
        )
        if not page[10] & _META or magic != _MAGIC or version != _VERSION:
            raise DatasetError(f"{self.file} cannot be read as an LMDB: it has no such header")
        has_valid_size = page_bytes in _PAGE_SIZES and self.page_bytes in (0, page_bytes)
        self._require(has_valid_size, f"its page size is {page_bytes}")
        self._require(flags == 0, "it has sorted duplicates, which no store of rows has")
        self.page_bytes = page_bytes
        return root, last, transaction

    def _children(self, number: int) -> list[int]:
        """Check a page of the index, and return the pages of the index below it."""
        self._require(2 <= number <= self.last, f"page {number} does not exist")
        page = os.pread(self.descriptor, self.page_bytes, number * self.page_bytes)
        own_number, kind, lower, upper = struct.unpack_from("<Q2xHHH", page)
        is_valid = own_number == number and kind in (_BRANCH, _LEAF)
        is_valid = is_valid and _HEADER_BYTES <= lower <= upper <= self.page_bytes
        self._require(is_valid, f"page {number} has a wrong header")
        offsets = struct.unpack_from(f"<{(lower - _HEADER_BYTES) // 2}H", page, _HEADER_BYTES)
        children = []
        for at in offsets:
            self._require(
                upper <= at <= self.page_bytes - _NODE.size, f"page {number} has a wrong offset"
            )
            low, high, flags, key_bytes = _NODE.unpack_from(page, at)
            data_bytes = low | high << 16
            end = at + _NODE.size + key_bytes
            if kind == _BRANCH:
                children.append(data_bytes | flags << 32)
            elif flags & _ELSEWHERE:
                self._require(end + 8 <= self.page_bytes, f"page {number} has a wrong key")
                (first,) = struct.unpack_from("<Q", page, end)
                pages = -(-(_HEADER_BYTES + data_bytes) // self.page_bytes)
                self._require(
                    2 <= first <= self.last + 1 - pages, f"a value of page {number} is outside"
                )
            else:
                end += data_bytes
            self._require(end <= self.page_bytes, f"page {number} has a wrong key or value")
        return children

    def _require(self, is_right: bool, problem: str) -> None:
        if not is_right:
            raise DatasetError(
                f"{self.file} is damaged: {problem}; convert the data again, or copy it again"
            )
