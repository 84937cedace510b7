"""A master that is reached over https."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest
import requests

from mlbench_core.client.api import ApiClient
from tests.master.helpers import server, wait_for
from tests.security.test_token import mlbench


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate for 127.0.0.1 that signs itself, with its key in the same file."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("needs the program openssl")
    path = tmp_path / "certificate.pem"
    options = [
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-subj",
        "/CN=mlbench",
    ]
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    command = [
        program,
        "req",
        "-x509",
        *options,
        *names,
        "-keyout",
        str(tmp_path / "key.pem"),
        "-out",
        str(path),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return path


def test_clients_and_workers_talk_over_tls(
    certificate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from mlbench_core.api import ApiClient\nimport os\n"
        "with ApiClient(url=os.environ['MLBENCH_MASTER_URL']) as client:\n"
        "    assert client.post_metric(1, 'loss', 1).result().status_code == 201\n"
    )
    options = ("--certificate", str(certificate), "--key", str(tmp_path / "key.pem"))
    with monkeypatch.context() as patch:
        patch.setenv("MLBENCH_CA_BUNDLE", str(certificate))
        context = server(
            tmp_path / "data",
            *options,
            token=(),
            verify=ssl.create_default_context(cafile=certificate),
        )
        with context as (base, _), ApiClient(url=base) as client:
            assert base.startswith("https://127.0.0.1:")
            assert mlbench("run", "r", "1", "--command", f"python {script}").returncode == 0
            wait_for(
                lambda: client.get_run(1).result().json()["state"] in ("finished", "failed"),
                what="the end",
            )
            assert set(client.get_run_metrics(1).result().json()) == {"loss"}
            address = mlbench("get-dashboard-url", "--login").stdout.strip()
            answer = httpx.get(address, verify=ssl.create_default_context(cafile=certificate))
            assert "Secure" in answer.headers["set-cookie"].split("; ")
            with pytest.raises(requests.ConnectionError):
                requests.get(base.replace("https", "http"), timeout=60)
            # The variables of requests count, too, and without one of them the certificate is
            # unknown.
            patch.delenv("MLBENCH_CA_BUNDLE")
            assert mlbench("status", REQUESTS_CA_BUNDLE=str(certificate)).returncode == 0
            with ApiClient(url=base) as stranger, pytest.raises(requests.exceptions.SSLError):
                stranger.get_runs().result()


def test_a_certificate_that_cannot_be_used_is_one_clear_line(
    certificate: Path, tmp_path: Path
) -> None:
    start = ("master", "--port", "0", "--data-dir", str(tmp_path / "data"))
    for done in (
        mlbench(*start, "--certificate", str(certificate)),
        mlbench(*start, "--certificate", __file__),
    ):
        assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr
        assert "cannot use --certificate" in done.stderr
    assert mlbench(*start, "--key", str(certificate)).returncode == 2
