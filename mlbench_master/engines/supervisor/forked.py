"""Workers that are forks of a process that has imported torch, and that run a Python script.

A worker that is started as a new program spends seconds on imports. A fork has them done. It is
made to look like a new program: its own session, signals, files, variables, ``sys.path`` and
``sys.argv``, and its own words in the list of processes.
"""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from mlbench_core.calling_environment import OBSERVER

__all__ = [
    "BecomeWorker",
    "ForkedWorker",
    "finds_other_modules",
    "rename_process",
    "replace_variables",
    "startup_variables",
    "trains_in_this_python",
]

_SCRIPT_BYTES = 2**20
# Read by Python and by libraries when they are loaded, so a fork would keep those of its parent.
_STARTUP_PREFIXES = (
    *("ATEN_", "BLIS_", "DNNL_", "GLIBC_", "GOMP_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_"),
    *("MKL_", "NPY_", "NUMEXPR_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTHON", "PYTORCH_", "TORCH"),
    *("TRITON_", "VECLIB_"),
)
# A fork sets them itself.
_SET_IN_FORK = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONIOENCODING", "TORCHELASTIC_RUN_ID")


class BecomeWorker(BaseException):
    """Raised in a fork, to leave the frames of the supervisor before the script begins.

    Args:
        argv: The command: a Python, and a script or ``-m`` and a module, and the arguments.
        env: All variables of the worker.
        cwd: The folder in which it starts.
        outputs: The file descriptors of its output and its errors.
    """

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: str, outputs: tuple[int, int]
    ) -> None:
        super().__init__()
        self.argv = list(argv)
        self.env = dict(env)
        self.cwd = cwd
        self.outputs = outputs

    def run(self) -> None:
        """Become the worker and run the script to its end.

        Raises:
            BaseException: That of the script.
        """
        from mlbench_core.observe.script import end_as_python, run_script

        self._become()
        words = self.argv[1:]
        is_module = words[0] == "-m"
        if is_module:
            del words[0]
        script, *arguments = words
        error: BaseException | None = None
        try:
            run_script(script, arguments, is_module)
        except BaseException as raised:
            error = raised
        if error is not None:
            end_as_python(error, os.path.dirname(__file__))

    def _become(self) -> None:
        os.setsid()
        # A fork has the supervisor's handler of SIGTERM, which would not end this process. SIGINT
        # and SIGHUP stay ignored, as in programs that the supervisor starts.
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for standard, descriptor in enumerate((nothing, *self.outputs)):
            os.dup2(descriptor, standard)
        # Otherwise the pipes and ports of the supervisor would stay open as long as this worker.
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        for standard, name in enumerate(("stdin", "stdout", "stderr")):
            mode = "w"
            if name == "stdin":
                mode = "r"
            # Line by line, so that the log shows a line when it is printed. As in Python itself, a
            # script that closes sys.stdout leaves the descriptor open for its libraries.
            new = open(standard, mode, buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, new)
            # Some libraries write to the originals, which would still be those of the server.
            setattr(sys, f"__{name}__", new)
        parent_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        replace_variables(self.env)
        rename_process(self.argv, self.env)
        os.chdir(self.cwd)
        kept = [entry for entry in sys.path if entry not in parent_path]
        own = filter(None, self.env.get("PYTHONPATH", "").split(os.pathsep))
        # The script sets the first entry.
        sys.path[:] = ["", *dict.fromkeys([*own, *kept])]
        sys.orig_argv[:] = self.argv
        _seed_again()


def _seed_again() -> None:
    """Seed all generators from the system, as they are at the start of a program."""
    random.seed()
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed()
    if torch is not None:
        torch.default_generator.seed()


class ForkedWorker:
    """A worker, with the part of :class:`subprocess.Popen` that a supervisor uses.

    Args:
        argv: See :class:`BecomeWorker`.
        env: See :class:`BecomeWorker`.
        cwd: See :class:`BecomeWorker`.

    Attributes:
        pid: Its process id.

    Raises:
        BecomeWorker: In the fork. The calling process must have a single thread.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
        pipes = [os.pipe(), os.pipe()]
        self.pid = os.fork()
        if self.pid == 0:
            raise BecomeWorker(argv, env, cwd, (pipes[0][1], pipes[1][1]))
        for _, writing in pipes:
            os.close(writing)
        # Numbers and no files: in the next fork, a file would some day close its number, which the
        # script has got for a file of its own by then.
        self._reading = pipes[0][0], pipes[1][0]

    @property
    def stdout(self) -> IO[bytes]:
        """Its output, to be read once."""
        return open(self._reading[0], "rb")

    @property
    def stderr(self) -> IO[bytes]:
        """Its errors, to be read once."""
        return open(self._reading[1], "rb")

    def wait(self) -> int:
        """Wait for the end, and return the exit status, negative for a signal."""
        try:
            _, status = os.waitpid(self.pid, 0)
        except ChildProcessError:
            # The supervisor has ended it, and knows why.
            return 0
        return os.waitstatus_to_exitcode(status)


def trains_in_this_python(argv: Sequence[str], cwd: str, path: str) -> bool:
    """Return True if a command is a script for this Python that names torch or this library.

    Others would not gain from the imports that a fork has.

    Args:
        argv: The command.
        cwd: The folder in which it starts.
        path: The folders of programs, as in ``PATH``.
    """
    if len(argv) < 2:
        return False
    found = shutil.which(argv[0], path=path)
    # Links of several environments lead to the same file, so the folder counts.
    if found is None or Path(found).parent != Path(sys.executable).parent:
        return False
    if not os.path.samefile(found, sys.executable):
        return False
    if argv[1] == "-m":
        return argv[2:3] == [OBSERVER]
    if not argv[1].endswith(".py"):
        return False
    try:
        with Path(cwd, argv[1]).open("rb") as file:
            text = file.read(_SCRIPT_BYTES)
    except OSError:
        return False
    return b"torch" in text or b"mlbench_core" in text


def finds_other_modules(argv: Sequence[str], cwd: str, env: Mapping[str, str]) -> bool:
    """Return True if a new program would import another module than this process has imported.

    Args:
        argv: A command for which :func:`trains_in_this_python` holds.
        cwd: The folder in which it starts.
        env: Its variables.
    """
    # The first entry of Python's path: the folder of a script, or for a module the current one.
    first = Path(cwd, argv[1]).resolve().parent
    if argv[1] == "-m":
        first = Path(cwd)
    imported = {name.partition(".")[0] for name in sys.modules}
    for entry in (str(first), *env.get("PYTHONPATH", "").split(os.pathsep)):
        folder = Path(cwd, entry)
        if not entry or not folder.is_dir():
            continue
        for path in folder.iterdir():
            name = path.name.partition(".")[0]
            # A folder without this file does not hide a package that follows in the path.
            is_module = path.suffix == ".py" or (path / "__init__.py").is_file()
            if name not in imported or not is_module:
                continue
            file = getattr(sys.modules[name], "__file__", None) or ""
            if Path(file).resolve() not in (path.resolve(), path.resolve() / "__init__.py"):
                return True
    return False


def startup_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that have an effect only at the start of a program."""
    variables = {}
    for name, value in env.items():
        if name.startswith(_STARTUP_PREFIXES) and name not in _SET_IN_FORK:
            variables[name] = value
    return variables


def replace_variables(env: Mapping[str, str]) -> None:
    """Replace all variables of this process.

    Afterwards, none of them lies in the memory that :func:`rename_process` overwrites.
    """
    os.environ.clear()
    os.environ.update(env)


def rename_process(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Replace the words and variables that other processes see, as far as there is room.

    Linux shows the memory in which it once passed them. Other processes find those of a run by
    the variable with its folder.

    Args:
        argv: The words.
        env: All variables; the first ones are those that must be seen.
    """
    # After the name, which may contain blanks, follows the third field.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arg_start, arg_end, env_start, env_end = map(int, fields[45:49])
    _overwrite(arg_start, arg_end, argv)
    _overwrite(env_start, env_end, [f"{name}={value}" for name, value in env.items()])


def _overwrite(start: int, end: int, words: Sequence[str]) -> None:
    room = end - start
    content = b"".join(os.fsencode(word) + b"\0" for word in words)
    # A word that is cut ends with a null byte, too.
    content = content[: room - 1].ljust(room, b"\0")
    ctypes.memmove(start, content, room)
