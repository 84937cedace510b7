"""``python -m mlbench_master``: the master as a server."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import IO

from mlbench_core.errors import MLBenchError, require
from mlbench_core.paths import user_folder
from mlbench_master.launchers import LAUNCHERS, make_launcher

__all__ = ["main"]

_log = logging.getLogger("mlbench_master")


def main(arguments: list[str] | None = None) -> int:
    """Run the master until it is told to end; runs that go on are taken up again by the next one.

    Args:
        arguments: The command line, without the program's name.

    Returns:
        Exit status: 0, or 1 if it could not start; 2 (used wrongly) leaves through argparse.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    token = options.token or os.environ.get("MLBENCH_TOKEN") or None
    if not 0 <= options.port <= 65535:
        parser.error(f"--port {options.port}: must be 0 to 65535")
    if token is None and not _is_loopback(options.host):
        parser.error(
            f"--host {options.host} can be reached from other machines: give a token with --token or MLBENCH_TOKEN, "
            "or stay on 127.0.0.1"
        )
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        return _serve(options, token)
    except MLBenchError as error:
        _log.error("mlbench master: %s", error)
    except OSError as error:
        _log.error("mlbench master: %s: %s", error.filename or options.data_dir, error.strerror or error)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mlbench master", description="Keeps, starts and shows runs.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=5080, help="port, 0 for a free one (default: %(default)s)")
    parser.add_argument("--database-url", help="SQLAlchemy URL (default: SQLite in the data folder)")
    parser.add_argument("--token", help="secret that requests must carry (default: MLBENCH_TOKEN)")
    parser.add_argument("--data-dir", type=Path, help="folder for database and logs (default: the user's data folder)")
    parser.add_argument("--launcher", choices=LAUNCHERS, default="local", help="what starts runs (default: local)")
    return parser


def _is_loopback(host: str) -> bool:
    require("fastapi", "master")
    from mlbench_master.security import is_loopback

    return is_loopback(host)


def _serve(options: argparse.Namespace, token: str | None) -> int:
    for module in ("fastapi", "uvicorn", "sqlalchemy", "psutil"):
        require(module, "master")
    import uvicorn

    from mlbench_master.app import create_app
    from mlbench_master.events import EventBus

    class Server(uvicorn.Server):
        """Ends the endless answers first: else it would wait for the dashboards that watch."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            events: EventBus = app.state.events
            events.close()
            super().handle_exit(sig, frame)

    listener = _listen(options.host, options.port)
    if listener is None:
        return 1
    with listener:
        folder = (options.data_dir or user_folder("master")).expanduser().absolute()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = _lock(folder)
        if lock is None:
            _log.error("mlbench master: another master uses the folder %s; choose another with --data-dir", folder)
            return 1
        with lock:
            url = _url(options.host, listener.getsockname()[1])
            app = create_app(options.database_url, folder, token, make_launcher(options.launcher, folder), url)
            _log.info("MLBench master on %s (data in %s)", url, folder)
            config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5, timeout_keep_alive=30)
            Server(config).run(sockets=[listener])
    return 0


def _listen(host: str, port: int) -> socket.socket | None:
    """The listening socket, or None after one line that says why not."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With its protocol named, asyncio sends small answers at once (TCP_NODELAY): 40 ms less for each.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host.strip("[]"), port))
        listener.listen(128)
    except (OSError, UnicodeError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        _log.error("mlbench master: cannot listen on %s port %d: %s; choose another with --port", host, port, reason)
        return None
    return listener


def _lock(folder: Path) -> IO[str] | None:
    """Take the folder for this process: two masters would both look after the same runs."""
    file = (folder / "master.lock").open("w")
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        pass
    except OSError:
        file.close()
        return None
    return file


def _url(host: str, port: int) -> str:
    if host in ("0.0.0.0", "::", "[::]"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"http://[{host.strip('[]')}]:{port}" if ":" in host else f"http://{host}:{port}"


if __name__ == "__main__":
    sys.exit(main())
