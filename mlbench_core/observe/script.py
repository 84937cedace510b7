"""Run a script or a module as Python does."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import io
import os
import runpy
import signal
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from mlbench_core.errors import ConfigurationError

__all__ = ["check_script", "end_as_python", "run_script"]


def check_script(script: str) -> None:
    """Check a script before anything is written for it.

    Raises:
        ConfigurationError: It does not exist.
    """
    if not Path(script).exists():
        raise ConfigurationError(
            f"the script {script} does not exist in {os.getcwd()}: give its path, before its "
            "arguments"
        )


def run_script(script: str, arguments: Sequence[str], is_module: bool = False) -> None:
    """Run a script that exists as ``__main__``, as ``python SCRIPT ARGUMENTS`` does.

    ``sys.argv`` has the words as they were typed, and the folder of the script is first in
    ``sys.path``. A module is run as with ``python -m``.

    Args:
        script: Path of the script, or name of the module.
        arguments: The words after it.
        is_module: True for a module.

    Raises:
        ConfigurationError: The module does not exist.
        BaseException: That of the script, ``SystemExit`` too.
    """
    if is_module:
        _run_module(script, arguments)
        return
    path = Path(script)
    # python also runs a folder or a zip file with a __main__.py.
    if path.is_dir() or path.suffix in (".zip", ".pyz"):
        sys.argv[:] = [script, *arguments]
        runpy.run_path(script, run_name="__main__")
        return
    sys.argv[:] = [script, *arguments]
    sys.path[0] = str(path.resolve().parent)
    main = types.ModuleType("__main__")
    # Python joins the two without removing "." from the path.
    main.__file__ = os.path.join(os.getcwd(), script)
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", main.__file__)
    main.__spec__ = None
    # Pickle and multiprocessing look it up.
    sys.modules["__main__"] = main
    with io.open_code(main.__file__) as file:
        code = compile(file.read(), main.__file__, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _run_module(name: str, arguments: Sequence[str]) -> None:
    # Under python -m, the current folder is first.
    sys.path[0] = os.getcwd()
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        raise ConfigurationError(
            f"-m must have the name of a module that Python finds, not {name!r}: run it in the "
            "folder of the module, or give the path of a script"
        )
    sys.argv[:] = [spec.origin or name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def end_as_python(error: BaseException, *folders: str) -> None:
    """End the process as an exception of a script ends it.

    Args:
        error: The exception.
        folders: Folders whose frames are left out of the traceback, besides that of this package.

    Raises:
        SystemExit: With the exit status.
    """
    if isinstance(error, SystemExit):
        raise error
    trace = _without_frames(error.__traceback__, (os.path.dirname(__file__), *folders))
    error.__traceback__ = trace
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    sys.excepthook(type(error), error, trace)
    if isinstance(error, KeyboardInterrupt):
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    raise SystemExit(1)


def _without_frames(trace: TracebackType | None, folders: Sequence[str]) -> TracebackType | None:
    """Return a traceback without the frames of some folders, as the script would have it."""
    own = tuple(folder + os.sep for folder in folders)
    kept = []
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(own):
            kept.append(trace)
        trace = trace.tb_next
    result: TracebackType | None = None
    for entry in reversed(kept):
        result = TracebackType(result, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return result
