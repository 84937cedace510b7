"""Run the master as a server: its socket, its data folder, and its shutdown."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from mlbench_core import files
from mlbench_core.errors import ConfigurationError
from mlbench_core.paths import user_folder
from mlbench_master.launchers import make_launcher

__all__ = ["serve"]

_log = logging.getLogger("mlbench_master")


def serve(
    host: str,
    port: int,
    token: str | None,
    started: Callable[[str], None],
    database_url: str | None = None,
    data_dir: Path | None = None,
    launcher: str = "local",
) -> None:
    """Run the master in this process until SIGINT or SIGTERM; the next master takes over its runs.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 chooses a free one.
        token: Secret that requests must carry; None only if ``host`` cannot be reached from other machines.
        started: Called with the master's URL once it owns the port and the data folder.
        database_url: SQLAlchemy URL; by default SQLite in the data folder.
        data_dir: Folder for database and logs; by default ``master`` in the user's folder.
        launcher: One of :data:`~mlbench_master.launchers.LAUNCHERS`.

    Raises:
        ConfigurationError: The address, the folder or the database cannot be used.
    """
    import uvicorn

    from mlbench_master.app import create_app
    from mlbench_master.connections import ACCEPTED_AT_ONCE, LISTEN_BACKLOG, Connection, LogLimit
    from mlbench_master.events import EventBus

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            listener.listen(LISTEN_BACKLOG)  # asyncio has set it to the number that it accepts at once

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            """End at a signal, without uvicorn's second raise of the signal, which would skip the callers' cleanup."""
            _log.info("the master is ending")
            events: EventBus = app.state.events
            events.close()  # otherwise the server would wait for open dashboards
            self.force_exit = self.should_exit and sig == signal.SIGINT
            self.should_exit = True

    with _listen(host, port) as listener, contextlib.ExitStack() as stack:
        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
        for handler in logging.getLogger().handlers:
            handler.addFilter(LogLimit())
        folder = (data_dir or user_folder("master")).expanduser().absolute()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:  # two masters would both handle the same runs
            stack.enter_context(files.lock(folder / "master.lock", wait=False))
        except TimeoutError:
            raise ConfigurationError(
                f"another master uses the folder {folder}; choose another with --data-dir"
            ) from None
        # A worker on this machine cannot connect to the address that stands for all addresses.
        name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host.strip("[]"), host.strip("[]"))
        url = f"http://{f'[{name}]' if ':' in name else name}:{listener.getsockname()[1]}"
        app = create_app(database_url, folder, token, make_launcher(launcher, folder), url)
        started(url)
        _log.info("MLBench master on %s (data in %s)", url, folder)
        config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            backlog=ACCEPTED_AT_ONCE,
            log_config=None,  # the handler above, whose records are limited, gets uvicorn's records, too
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=5,
            timeout_keep_alive=30,
        )
        Server(config).run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    """Return the listening socket."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only if the protocol is named. It saves 40 ms for each small answer.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host.strip("[]"), port))
        listener.listen(128)
    except (OSError, UnicodeError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(f"cannot listen on {host} port {port}: {reason}; choose another with --port") from None
    return listener
