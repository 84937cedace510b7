"""``mlbench master`` and ``mlbench get-dashboard-url``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlbench_cli import _embedded
from mlbench_cli._engine_options import EngineType
from mlbench_cli._output import dashboard_option, json_option, print_json
from mlbench_core.addresses import is_loopback
from mlbench_core.client.masters import check_token, forget_master, remember_master
from mlbench_core.errors import ConfigurationError
from mlbench_core.files import check_only_own
from mlbench_core.paths import user_folder
from mlbench_master.engines import ENGINES

if TYPE_CHECKING:
    from mlbench_master.access.credentials import Access

__all__ = ["get_dashboard_url", "master"]

_DATABASE_VARIABLE = "MLBENCH_DATABASE_URL"
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.option(
    "--host", default=_embedded.DEFAULT_HOST, show_default=True, help="Address to listen on."
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=_embedded.DEFAULT_PORT,
    show_default=True,
    help="Port, 0 for a free one.",
)
@click.option(
    "--database-url",
    metavar="URL",
    envvar=_DATABASE_VARIABLE,
    help=(
        "SQLAlchemy URL of a database instead of SQLite. "
        f"'ps' shows it to others; {_DATABASE_VARIABLE} does not."
    ),
)
@click.option(
    "--token",
    envvar="MLBENCH_TOKEN",
    help="Token that clients must send; by default a random one, which your own clients find "
    "automatically. 'ps' shows it to others; MLBENCH_TOKEN and --token-file do not.",
)
@click.option("--token-file", type=_FILE, help="File with the token.")
@click.option(
    "--no-token",
    is_flag=True,
    help="Demand no token: every program and user of this machine can then run commands as you.",
)
@click.option("--certificate", type=_FILE, help="Certificate (PEM) for https.")
@click.option(
    "--key", type=_FILE, help="Private key (PEM) of the certificate, if its file does not hold it."
)
@click.option(
    "--root-path",
    default="",
    metavar="PATH",
    help="Path below which a proxy serves the master, for example /user/me/proxy/5080; by default "
    "that in the header X-Forwarded-Prefix of the proxy.",
)
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for database and logs.",
)
@click.option(
    "--engine",
    type=EngineType(),
    default="local",
    show_default=True,
    help=f"The engine that starts runs: {', '.join(ENGINES)}, or one of another package.",
)
@click.option(
    "--end-when-idle",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help=(
        "End after this time without a run, waiting or running, "
        "and without a request (default: never)."
    ),
)
@click.option("--stop", "stop", is_flag=True, help="Stop the master that runs on this machine.")
@click.option("--json", "as_json", is_flag=True, help="With --stop: write JSON instead of text.")
@click.pass_context
def master(
    ctx: click.Context,
    host: str,
    port: int,
    token: str | None,
    token_file: Path | None,
    no_token: bool,
    certificate: Path | None,
    key: Path | None,
    root_path: str,
    stop: bool,
    database_url: str | None,
    data_dir: Path | None,
    engine: str,
    end_when_idle: float | None,
    as_json: bool,
) -> None:
    """Start the master in the foreground, or stop the one that 'mlbench run' started.

    Ctrl-C ends it. Its runs continue, and the next master takes them over.
    """
    if stop:
        stopped = _embedded.stop_embedded()
        if as_json:
            print_json(dict(stopped))
        else:
            click.echo(f"stopped the master at {stopped['url']} (process {stopped['pid']})")
        return
    if as_json:
        raise click.UsageError("--json needs --stop: a master that runs prints a log")
    token = _token(ctx, token, token_file, no_token)
    if not token and not is_loopback(host):
        raise click.UsageError(
            f"--host {host} can be reached from other machines, whose users must know the token: "
            "give one with --token-file, --token or MLBENCH_TOKEN, or stay on 127.0.0.1"
        )
    if key and not certificate:
        raise click.UsageError("--key needs --certificate")
    # Two masters with the same data would look after the same runs; another folder or database
    # makes a second safe.
    running = _embedded.embedded()
    if running is not None and not (data_dir or database_url):
        raise ConfigurationError(
            f"a master with the same data runs at {running.url}; use it, stop it with "
            "'mlbench master --stop', or choose another folder with --data-dir"
        )
    _embedded.check_installed()
    # After the check, because this import fails if a package of the master is missing.
    from mlbench_master.server import Listen, serve

    # The commands of runs inherit the environment, and they need no access to the database.
    os.environ.pop(_DATABASE_VARIABLE, None)

    # Called when the server listens: only then is the port known if --port is 0.
    def started(url: str, access: Access) -> None:
        folder = (data_dir or user_folder("master")).expanduser().absolute()
        remember_master(url, os.getpid(), access.token, access.key, str(folder), engine)

    listen = Listen(host, port, certificate, key)
    try:
        serve(
            listen,
            token,
            started,
            no_token,
            database_url,
            data_dir,
            engine,
            end_when_idle,
            root_path,
        )
    finally:
        forget_master(os.getpid())


def _token(
    ctx: click.Context, token: str | None, token_file: Path | None, no_token: bool
) -> str | None:
    """Return the token that the user gave, or None."""
    # A variable in the environment is a default; options overrule it.
    is_default = ctx.get_parameter_source("token") == click.core.ParameterSource.ENVIRONMENT
    if is_default and (token_file or no_token):
        token = None
    if [token is not None, token_file is not None, no_token].count(True) > 1:
        raise click.UsageError(
            "--token, --token-file and --no-token exclude each other: give one of them"
        )
    if token_file is not None:
        check_only_own(token_file)
        # Editors end a file with a line break.
        token = token_file.read_text(encoding="utf-8-sig", errors="replace").strip()
    if token is None:
        return None
    return check_token(token)


@click.command("get-dashboard-url")
@dashboard_option
@click.option(
    "--login",
    is_flag=True,
    help="Print an address that logs a browser in; it works once, for 10 minutes.",
)
@json_option
def get_dashboard_url(dashboard_url: str | None, login: bool, as_json: bool) -> None:
    """Print the address of the dashboard."""
    location = _embedded.find(dashboard_url)
    url = _embedded.login_url(location) if login else location.url
    if as_json:
        print_json({"url": url, "source": location.source})
    else:
        click.echo(url)
