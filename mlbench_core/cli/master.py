"""``mlbench master`` and ``mlbench get-dashboard-url``."""

from __future__ import annotations

import os
from pathlib import Path

import click

from mlbench_core.addresses import is_loopback
from mlbench_core.cli import _embedded, _settings
from mlbench_core.cli._output import dashboard_option, json_option, print_json
from mlbench_core.errors import ConfigurationError
from mlbench_master.launchers import LAUNCHERS

__all__ = ["get_dashboard_url", "master"]


@click.command()
@click.option("--host", default=_embedded.DEFAULT_HOST, show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=_embedded.DEFAULT_PORT,
    show_default=True,
    help="Port, 0 for a free one.",
)
@click.option("--database-url", metavar="URL", help="SQLAlchemy URL of a database instead of SQLite.")
@click.option("--token", envvar="MLBENCH_TOKEN", help="Token that clients must send; needed outside 127.0.0.1.")
@click.option("--data-dir", type=click.Path(file_okay=False, path_type=Path), help="Folder for database and logs.")
@click.option("--launcher", type=click.Choice(LAUNCHERS), default="local", show_default=True, help="What starts runs.")
@click.option("--stop", "stop", is_flag=True, help="Stop the master that runs on this machine.")
def master(
    host: str,
    port: int,
    database_url: str | None,
    token: str | None,
    data_dir: Path | None,
    launcher: str,
    stop: bool,
) -> None:
    """Start the master in the foreground, or stop the one that 'mlbench run' started.

    Ctrl-C ends it. Its runs continue, and the next master takes them over.
    """
    if stop:
        known = _embedded.stop_embedded()
        click.echo(f"stopped the master at {known['url']} (process {known['pid']})")
        return
    if not token and not is_loopback(host):
        raise click.UsageError(
            f"--host {host} can be reached from other machines: give a token with --token or MLBENCH_TOKEN, "
            "or stay on 127.0.0.1"
        )
    # Two masters with the same data would look after the same runs; another folder or database makes a second safe.
    running = _embedded.embedded()
    if running is not None and not (data_dir or database_url):
        raise ConfigurationError(
            f"a master with the same data runs at {running.url}; use it, stop it with 'mlbench master --stop', "
            "or choose another folder with --data-dir"
        )
    _embedded.check_installed()
    # After the check, because this import fails if a package of the master is missing.
    from mlbench_master.server import serve

    # Called when the server listens: only then is the port known if --port is 0.
    def started(url: str) -> None:
        if running is None:
            _embedded.record(url, os.getpid(), token)

    try:
        serve(host, port, token or None, started, database_url, data_dir, launcher)
    finally:
        # The record may be that of the first master, if this is a second one with a folder of its own.
        if _settings.read(_settings.MASTER).get("pid") == os.getpid():
            _settings.forget(_settings.MASTER)


@click.command("get-dashboard-url")
@dashboard_option
@json_option
def get_dashboard_url(dashboard_url: str | None, as_json: bool) -> None:
    """Print the address of the dashboard."""
    location = _embedded.find(dashboard_url)
    if as_json:
        print_json({"url": location.url, "source": location.source})
    else:
        click.echo(location.url)
