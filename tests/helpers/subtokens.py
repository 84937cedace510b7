"""Small vocabularies of sub-tokens, as files."""

from __future__ import annotations

from pathlib import Path

ESCAPES = "\\_u;0123456789"


def write_subtokens(path: Path, *subtokens: str) -> Path:
    """Write padding, end, these sub-tokens, their characters, and those of escapes."""
    lines = dict.fromkeys(["<pad>", "<EOS>", *subtokens, *"".join(subtokens), *ESCAPES])
    path.write_bytes("".join(f"'{line}'\n" for line in lines).encode())
    return path
