"""Run the commands of a tutorial as its reader would, in order and in one folder.

The fenced blocks of a page are read like this:

* ``python`` and ``toml``: a file. Its first line is a comment with its name: ``# median.py``. A
  block with another first line is an example, and is left out.
* ``bash``: commands, run in the order of the page. A folder that one of them changes to stays the
  folder of the next.
* ``text`` after such a block: its output, loosely. Every line must occur in the output, in this
  order; each number stands for any number, ``...`` for any text, and a line ``...`` for any lines.

A MyST comment before a block, which readers do not see, says what the test does with it: ``% test:
not run, because
...``. The text of the page says so too.

A command that begins with ``python`` or ``torchrun`` is a script that is forked from a process that
has torch, and ``mlbench`` is this version. With ``MLBENCH_TUTORIALS=complete``, all commands run as
they are printed and in full size, with the programs on the PATH. This takes about 15 minutes."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.helpers.forked import ForkedScript
from tests.helpers.processes import ROOT, free_port

PAGES = ROOT / "docs" / "tutorials"
COMPLETE = os.environ.get("MLBENCH_TUTORIALS") == "complete"
LIMIT_S = 3600 if COMPLETE else 120

_BLOCK = re.compile(r"(?:^% test: ([^\n]*)\n)?^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"# ([\w.-]+\.(?:py|toml|txt))\n|# (Dockerfile)\n")
_NUMBER = re.compile(r"[-+]?\d[\d,.:]*(?:e[-+]?\d+)?")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        language: The word after the fence.
        text: What is inside.
        note: The text of the comment ``% test:`` before it; empty without one.
    """

    language: str
    text: str
    note: str = ""

    @property
    def file_name(self) -> str | None:
        """The name of the file that the block shows; None for other blocks."""
        found = _FILE.match(self.text)
        return (found[1] or found[2]) if found else None

    def commands(self) -> list[str]:
        """The commands of a block of the shell, continued lines joined, comments left out."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [
            " ".join(line.split()) for line in lines if line.strip() and not line.startswith("#")
        ]


def blocks(page: str) -> list[Block]:
    """The blocks of a page in their order."""
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    return [Block(language, inside, note or "") for note, language, inside in _BLOCK.findall(text)]


def as_pattern(line: str) -> str:
    """A pattern that a line of output matches if it differs from this one in numbers and in spaces
    only."""
    parts = [
        r"\s+".join(re.escape(word) for word in _NUMBER.sub("\0", part).split()).replace(
            "\0", _NUMBER.pattern
        )
        for part in re.sub(r"-{3,}", "---", line).split("...")
    ]
    return r"\s*" + r".*".join(parts) + r"\s*"


def missing_line(expected: str, output: str) -> str | None:
    """The first line of an expected output that the output lacks at its place; None if it has all
    of them."""
    printed = iter(re.sub(r"-{3,}", "---", output).splitlines())
    for line in expected.splitlines():
        if line.strip() in ("", "..."):
            continue
        pattern = re.compile(as_pattern(line))
        if not any(pattern.fullmatch(other) for other in printed):
            return line
    return None


@dataclass
class Reader:
    """Somebody who follows a page in a folder.

    Args:
        folder: The folder in which the first command runs.
        programs: A folder for the programs ``mlbench`` and ``python``, which is first on the PATH.
        variables: Changes of the environment.
    """

    folder: Path
    programs: Path
    variables: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.programs.mkdir(exist_ok=True)
        if COMPLETE:
            return
        for name, module in (("mlbench", "-m mlbench_cli"), ("python", "")):
            program = self.programs / name
            program.write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
            program.chmod(0o755)

    def follow(
        self,
        page: str,
        changes: Sequence[tuple[str, str]] = (),
        only: Iterable[Block] | None = None,
    ) -> str:
        """Save the files and run the commands of a page, and compare their output with the printed
        one.

        Args:
            page: The page's name, without ``.md``.
            changes: Pairs of a text and its replacement, which make commands and files small, and
                change the printed output accordingly. Every one is used.
            only: The blocks to follow; None for all of the page.

        Returns:
            The output of all commands.
        """
        unused = [] if COMPLETE else [old for old, _ in changes]
        output, everything = "", []
        for block in blocks(page) if only is None else only:
            if block.note:
                continue
            text = block.text
            for old, new in () if COMPLETE else changes:
                if old in text:
                    text = text.replace(old, new)
                    unused = [other for other in unused if other != old]
            changed = Block(block.language, text)
            if changed.language == "text":
                missing = missing_line(text, output)
                assert missing is None, (
                    f"{page}: this line of the page is not in the output: {missing}\n{output}"
                )
            elif changed.language == "bash":
                output = "".join(self.run(command) for command in changed.commands())
                everything.append(output)
            elif changed.file_name is not None:
                (self.folder / changed.file_name).write_text(text)
        assert not unused, f"{page} does not have what is to be replaced: {unused}"
        return "".join(everything)

    def run(self, command: str) -> str:
        """Run a command and return what it wrote; a failure of the command is one of the test."""
        # The shell expands patterns of file names.
        if re.match(r"(python|torchrun) [^*|;]*$", command) and not COMPLETE:
            status, output = self._fork(shlex.split(command))
        else:
            shell = subprocess.run(
                ["bash", "-c", f'set -eo pipefail\n{command}\npwd > "$READER_FOLDER"'],
                cwd=self.folder, env=self._environment(), text=True, timeout=LIMIT_S,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            status, output = shell.returncode, shell.stdout
            if status == 0:
                self.folder = Path((self.programs / "folder").read_text().strip())
        assert status == 0, f"{command!r} ended with {status}:\n{output}"
        return output

    def _environment(self) -> dict[str, str]:
        search = os.pathsep.join([str(self.programs), os.environ["PATH"]])
        inherited = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PATH": search}
        return {**inherited, **self.variables, "READER_FOLDER": str(self.programs / "folder")}

    def _fork(self, words: Sequence[str]) -> tuple[int, str]:
        """Fork ``python SCRIPT ...`` or the workers of ``torchrun --nproc-per-node K SCRIPT
        ...``."""
        script, ranks = list(words[1:]), [dict[str, str]()]
        if words[0] == "torchrun":
            assert script[0] == "--nproc-per-node", words
            place = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(free_port()),
                "WORLD_SIZE": script[1],
            }
            ranks = [
                {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                for rank in range(int(script[1]))
            ]
            script = script[2:]
        before = Path.cwd()
        os.chdir(self.folder)  # a forked script begins in this process's folder
        try:
            workers = [ForkedScript(script, **{**self.variables, **rank}) for rank in ranks]
        finally:
            os.chdir(before)
        try:
            done = [worker.finish(LIMIT_S) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
        return max(abs(worker.returncode) for worker in done), "".join(
            w.stdout + w.stderr for w in done
        )
