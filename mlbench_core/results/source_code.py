"""Identify the source code of a run: the commit of its checkout, and the local changes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

from mlbench_core.files import digest

__all__ = ["describe_checkout"]

_TIMEOUT_S = 10.0
# To hash more than this would delay the run.
_MOST_CHANGED_BYTES = 256 << 20
# Other new files may be data, or the results of earlier runs: with them, no two runs would have the
# same difference.
_CODE = (
    *(".c", ".cc", ".cfg", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".ini", ".py", ".pyx", ".sh"),
    *(".toml", ".yaml", ".yml"),
)
# Git sets these for its hooks. A run that such a hook starts would otherwise describe the hook's
# repository.
_GIT_VARIABLES = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_COMMON_DIR",
    "GIT_OBJECT_DIRECTORY",
    "GIT_PREFIX",
)


def describe_checkout(path: Path, *, accept_new: bool = False) -> dict[str, Any] | None:
    """Describe the checkout to which a file or folder belongs.

    The local difference consists of the files that differ from the commit. These are changed and
    removed files, and new files of code or settings (such as ``.py``, ``.cu`` or ``.yaml``) that
    Git does not ignore. The hash depends only on their names and contents, and not on the version
    or the settings of Git. Of a submodule, only the name counts.

    Git runs neither a hook nor a file system monitor, and writes nothing to the repository. Each of
    four commands may take 10 seconds.

    Args:
        path: A file or folder.
        accept_new: True to accept a path that Git does not track yet, unless it ignores it. False
            suits an installed package, whose folder may happen to lie inside the checkout of
            another project.

    Returns:
        ``commit`` in hexadecimal digits; ``changed_files``, the number of files that differ; and
        ``difference_sha256``, None without a difference. If the difference cannot be read or has
        more than 256 MiB, ``difference_sha256`` and possibly ``changed_files`` are None. The whole
        result is None if the path is not in a repository, Git is not installed, or Git refuses the
        repository because another user owns it.

    Example:
        >>> import tempfile
        >>> describe_checkout(Path(tempfile.mkdtemp())) is None
        True
    """
    try:
        path = path.resolve()
        folder = path
        # Git starts in a folder.
        if not path.is_dir():
            folder = path.parent
        output = _git(folder, "rev-parse", "--show-toplevel", "HEAD")
        top, commit = map(os.fsdecode, output.splitlines())
        root = Path(top)
        kinds = ["--cached"]
        if accept_new:
            kinds += ["--others", "--exclude-standard"]
        # Fails if no such file is known to Git.
        _git(root, "ls-files", "--error-unmatch", *kinds, "--", str(path))
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    description: dict[str, Any] = {
        "commit": commit,
        "changed_files": None,
        "difference_sha256": None,
    }
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        names = _changed_files(root)
        description["changed_files"] = len(names)
        if names:
            description["difference_sha256"] = _hash_files(root, names)
    return description


def _changed_files(root: Path) -> list[bytes]:
    """Return the names of the files that differ from the commit, in order."""
    # Not `git diff`, which may rewrite the index. A submodule with changes would be inspected by
    # another Git process, with the settings of the submodule.
    options = ("-z", "--no-renames", "--untracked-files=no", "--ignore-submodules=dirty")
    status = _git(root, "status", "--porcelain=v1", *options)
    # Two letters and a space precede each name.
    changed = [line[3:] for line in status.split(b"\0")]
    code = [f"*{suffix}" for suffix in _CODE]
    new = _git(root, "ls-files", "-z", "--others", "--exclude-standard", "--", *code)
    return sorted(set(filter(None, (*changed, *new.split(b"\0")))))


def _hash_files(root: Path, names: list[bytes]) -> str | None:
    """Return the hash over names and contents of files; None if they are too large."""
    hasher = hashlib.sha256()
    left = _MOST_CHANGED_BYTES
    for name in names:
        path = root / os.fsdecode(name)
        if not os.path.lexists(path):
            kind, content = "removed", ""
        elif path.is_symlink():
            # Git tracks where a link leads, and not the file there.
            kind, content = "link", digest(os.fsencode(os.readlink(path)))
        elif path.is_file():
            left -= path.stat().st_size
            if left < 0:
                return None
            kind, content = "file", digest(path)
            # Of the mode, Git tracks only this.
            if path.stat().st_mode & stat.S_IXUSR:
                kind = "executable"
        else:
            # A folder of a submodule, or a pipe, which could be read without end.
            kind, content = "other", ""
        # No name contains a zero byte, so two different lists of files never give the same bytes.
        hasher.update(b"\0".join([name, kind.encode(), content.encode(), b""]))
    return hasher.hexdigest()


def _git(folder: Path, command: str, *arguments: str) -> bytes:
    """Return the output of a Git command that only reads.

    Raises:
        OSError: Git is not installed.
        subprocess.SubprocessError: The command failed or took too long.
    """
    environment = dict(os.environ)
    for name in _GIT_VARIABLES:
        environment.pop(name, None)
    # Without optional locks, Git does not store the refreshed index, which another process may be
    # changing.
    environment.update(GIT_OPTIONAL_LOCKS="0", GIT_TERMINAL_PROMPT="0", LC_ALL="C")
    safe = ("-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}")
    return subprocess.run(
        ["git", *safe, "-C", str(folder), command, *arguments],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env=environment, timeout=_TIMEOUT_S, check=True,
    ).stdout  # fmt: skip
