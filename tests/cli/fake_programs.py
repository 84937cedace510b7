"""Programs that manage clusters, as scripts that record their calls and fail on demand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

# $0 is PATH/bin/NAME. Files of the folder PATH hold what programs answer:
# answer-NAME-FIRST_ARGUMENT. A file fail-NAME-FIRST_ARGUMENT lets them fail with its text.
SCRIPT = """#!/bin/sh
PATH=/usr/bin:/bin
name=${0##*/}
folder=${0%/bin/*}
key="$name-$1"
test "$name" = ssh && case "$*" in *"cat mlbench"*) key=ssh-cat ;; esac
test "$name" = sky && case "$*" in *--dryrun*) key=sky-dryrun ;; esac
printf '%s %s\\n' "$name" "$*" >> "$folder/calls"
case "$*" in
    *" -"|*" - "*) cat > "$folder/stdin-$key" ;;
esac
if test -f "$folder/fail-$key"; then cat "$folder/fail-$key" >&2; exit 7; fi
if test -f "$folder/answer-$key"; then cat "$folder/answer-$key"; fi
case "$key $2" in
    "kind-create cluster") echo "$4" >> "$folder/answer-kind-get" ;;
    "kind-delete cluster") : > "$folder/answer-kind-get" ;;
esac
exit 0
"""
PROGRAMS = ("kind", "kubectl", "helm", "docker", "sky", "ssh")


class FakePrograms:
    """Puts the programs into a folder and into PATH, in which nothing else is.

    Attributes:
        folder: The folder with their answers and the record of their calls.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        for name in PROGRAMS:
            (self.bin / name).write_text(SCRIPT)
            (self.bin / name).chmod(0o755)
        patch.setenv("PATH", str(self.bin))
        patch.delenv("KIND_EXPERIMENTAL_PROVIDER", raising=False)

    def remove(self, *names: str) -> None:
        """Uninstall programs."""
        for name in names:
            (self.bin / name).unlink()

    def fail(self, key: str, message: str | None = "it broke") -> None:
        """Let calls such as ``kind-create`` fail, or work again if there is no message."""
        path = self.folder / f"fail-{key}"
        path.unlink() if message is None else path.write_text(message)

    def answer(self, key: str, answer: Any) -> None:
        """Set what calls such as ``kind-get`` print."""
        (self.folder / f"answer-{key}").write_text(
            answer if isinstance(answer, str) else json.dumps(answer)
        )

    def stdin(self, key: str) -> str:
        """Return what the last call such as ``helm-upgrade`` read."""
        return (self.folder / f"stdin-{key}").read_text()

    def calls(self) -> list[str]:
        """Return the calls since the last question, in order."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines
