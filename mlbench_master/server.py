"""Run the master as a server: its socket, its data folder, and its shutdown."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import signal
import socket
import ssl
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from mlbench_core import files
from mlbench_core.addresses import is_loopback
from mlbench_core.errors import ConfigurationError
from mlbench_core.paths import user_folder
from mlbench_master.access.credentials import CODE_S, Access, make_private, random_token
from mlbench_master.engines import make_engine

__all__ = ["Listen", "serve"]

_log = logging.getLogger("mlbench_master")
# Other users of this machine may try a thousand tokens per second. This number of random letters
# and digits resists.
_SHORT_TOKEN = 16
# From malloc.h of glibc.
_M_ARENA_MAX = -8


@dataclass(frozen=True)
class Listen:
    """The address at which a master listens.

    Args:
        host: The address. It must be one of loopback if the master demands no token.
        port: The port; 0 chooses a free one.
        certificate: File with the certificate for https and those between it and its authority, as
            PEM.
        key: File with the certificate's private key, as PEM; by default it is in the certificate's
            file.
    """

    host: str
    port: int
    certificate: Path | None = None
    key: Path | None = None


def serve(
    listen: Listen,
    token: str | None,
    started: Callable[[str, Access], None],
    no_token: bool = False,
    database_url: str | None = None,
    data_dir: Path | None = None,
    engine: str = "local",
    end_when_idle_s: float | None = None,
    root_path: str = "",
) -> None:
    """Run the master in this process until SIGINT or SIGTERM; the next master takes over its runs.

    Args:
        listen: The address to listen on.
        token: Secret that requests must carry; None for a random one, which is kept in the data
            folder.
        started: Called with the master's URL and secrets once it owns the port and the data folder.
        no_token: Demand no token: every user of this machine can then run commands as this process.
        database_url: SQLAlchemy URL; by default SQLite in the data folder.
        data_dir: Folder for database and logs; by default ``master`` in the user's folder.
        engine: One of :data:`~mlbench_master.engines.ENGINES`.
        end_when_idle_s: Seconds without a run or a request after which the master ends; None to
            keep running.
        root_path: The path below which a proxy serves the master, for example
            ``/user/me/proxy/5080``.

    Raises:
        ConfigurationError: The address, the certificate, the folder or the database cannot be used.
    """
    import uvicorn

    from mlbench_master.app import create_app
    from mlbench_master.connection_limits import (
        ACCEPTED_AT_ONCE,
        LISTEN_BACKLOG,
        Connection,
        LogLimit,
    )
    from mlbench_master.events import EventBus
    from mlbench_master.idle import IdleClock

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            # asyncio has set it to the number that it accepts at once.
            listener.listen(LISTEN_BACKLOG)

        async def on_tick(self, counter: int) -> bool:
            """Return True if the server must end, which uvicorn asks ten times per second."""
            if end_when_idle_s is not None:
                is_idle = clock.look() >= end_when_idle_s
                if is_idle and not self.should_exit:
                    text = "the master is ending: no run and no request for %g s"
                    _log.info(text, end_when_idle_s)
                    self.should_exit = True
            return await super().on_tick(counter)

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            """End at a signal."""
            # uvicorn's own handler raises the signal again, which would skip the callers' cleanup.
            _log.info("the master is ending")
            events: EventBus = app.state.events
            events.close()  # otherwise the server would wait for open dashboards
            self.force_exit = self.should_exit and sig == signal.SIGINT
            self.should_exit = True

    # glibc gives threads their own arenas, up to eight for each core. The threads that answer
    # requests would each keep what their largest answer needed, so the memory would grow for hours.
    with contextlib.suppress(AttributeError, OSError):  # a system without glibc
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)
    _check_certificate(listen)
    with _listen(listen.host, listen.port) as listener, contextlib.ExitStack() as stack:
        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
        for handler in logging.getLogger().handlers:
            handler.addFilter(LogLimit())
        folder = (data_dir or user_folder("master")).expanduser().absolute()
        make_private(folder)
        try:  # two masters would both handle the same runs
            stack.enter_context(files.lock(folder / "master.lock", wait=False))
        except TimeoutError:
            raise ConfigurationError(
                f"another master uses the folder {folder}; choose another with --data-dir"
            ) from None
        url = _url(listen, listener.getsockname()[1])
        if no_token:
            token = None
        elif not token:
            token = random_token(folder)
        app = create_app(database_url, folder, token, make_engine(engine, folder), url, root_path)
        clock = IdleClock(app, lambda: app.state.scheduler.has_runs)
        started(url, app.state.access)
        _log.info("MLBench master on %s (data in %s)", url, folder)
        _say_who_has_access(url, app.state.access, listen)
        if end_when_idle_s is not None:
            _log.info("it ends after %g s without a run or a request", end_when_idle_s)
        config = uvicorn.Config(
            clock,
            http=Connection,
            ws="none",
            backlog=ACCEPTED_AT_ONCE,
            # The handler above, whose records are limited, gets uvicorn's records, too.
            log_config=None,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=5,
            timeout_keep_alive=30,
            # Anybody on this machine could give a false address of the client in such a header.
            proxy_headers=False,
            ssl_certfile=listen.certificate,
            ssl_keyfile=listen.key,
        )
        Server(config).run(sockets=[listener])


def _url(listen: Listen, port: int) -> str:
    """Return the URL under which workers on this machine reach the master."""
    # They cannot connect to the wildcard address, which means all addresses.
    host = listen.host.strip("[]")
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    if ":" in name:
        name = f"[{name}]"
    scheme = "https" if listen.certificate else "http"
    return f"{scheme}://{name}:{port}"


def _say_who_has_access(url: str, access: Access, listen: Listen) -> None:
    from mlbench_master.access.login import login_path

    if access.token is None:
        _log.warning(
            "no token is needed: every program and user of this machine can run commands as you"
        )
        return
    path = login_path(access)
    _log.info("open it in a browser: %s%s (works once, within %d minutes)", url, path, CODE_S // 60)
    if listen.certificate is None and not is_loopback(listen.host):
        _log.warning(
            "the network can read the token: "
            "use --certificate, or a proxy with https on this machine"
        )
    if len(access.token) < _SHORT_TOKEN:
        _log.warning("the token can be guessed: use at least %d random characters", _SHORT_TOKEN)


def _check_certificate(listen: Listen) -> None:
    if listen.certificate is None:
        return
    try:
        # An empty password: a master in the background cannot ask for one.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(listen.certificate, listen.key, password="")
    except OSError as error:
        reason = error.strerror or error
        raise ConfigurationError(
            f"cannot use --certificate {listen.certificate} and its key: {reason}"
        ) from None


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only if the protocol is named. It saves 40 ms for each small answer.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        # A restarted master gets its port although connections of the old one are in TIME_WAIT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host.strip("[]"), port))
        listener.listen(128)
    except (OSError, UnicodeError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(
            f"cannot listen on {host} port {port}: {reason}; choose another with --port"
        ) from None
    return listener
