"""``mlbench master`` and ``mlbench get-dashboard-url``."""

from __future__ import annotations

import os
import signal
import subprocess

import click

from mlbench_core.cli import _embedded, _settings
from mlbench_core.cli._output import dashboard_option, json_option, print_json, remark
from mlbench_core.errors import ConfigurationError, MasterError

__all__ = ["get_dashboard_url", "master"]


@click.command()
@click.option("--host", default=_embedded.DEFAULT_HOST, show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(1, 65535), default=_embedded.DEFAULT_PORT, show_default=True, help="Port.")
@click.option("--database-url", metavar="URL", help="SQLAlchemy URL of a database instead of SQLite.")
@click.option("--token", envvar="MLBENCH_TOKEN", help="Token that clients must send; needed outside 127.0.0.1.")
@click.option("--data-dir", type=click.Path(file_okay=False), help="Folder for the database and the logs.")
@click.option("--stop", "stop", is_flag=True, help="Stop the master that runs on this machine.")
def master(host: str, port: int, database_url: str | None, token: str | None, data_dir: str | None, stop: bool) -> None:
    """Start the master in the foreground, or stop the one that 'mlbench run' started.

    Ctrl-C ends it. Runs that go on are taken up again by the next one.
    """
    if stop:
        known = _embedded.stop_embedded()
        click.echo(f"stopped the master at {known['url']} (process {known['pid']})")
        return
    if not token and host not in ("127.0.0.1", "localhost", "::1"):
        raise click.UsageError(f"a master that listens on {host} needs a token: --token or MLBENCH_TOKEN")
    running = _embedded.embedded()
    if running is not None and not (data_dir or database_url):
        raise ConfigurationError(
            f"a master with the same data runs at {running.url}; use it, stop it with 'mlbench master --stop', "
            "or choose another folder with --data-dir"
        )
    _embedded.check_installed()
    _embedded.check_port(host, port)
    environment = {**os.environ, **({"MLBENCH_TOKEN": token} if token else {})}
    process = subprocess.Popen(_embedded.master_command(host, port, database_url, data_dir), env=environment)
    recorded = running is None
    if recorded:
        _embedded.record(f"http://{_reachable(host)}:{port}", process.pid, token)
    try:
        status = _wait(process)
    finally:
        if recorded and _settings.read(_settings.MASTER).get("pid") == process.pid:
            _settings.forget(_settings.MASTER)
    if status not in (0, -signal.SIGTERM, -signal.SIGINT):
        raise MasterError(f"the master ended with exit status {status}; the reason is above")


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for the master; it hears Ctrl-C and SIGTERM too and ends by itself."""
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                remark("the master is ending")
    finally:
        signal.signal(signal.SIGTERM, before)


def _reachable(host: str) -> str:
    """The address under which this machine reaches a server that listens on ``host``."""
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


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
