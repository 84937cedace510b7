"""Metrics of a worker reach the master that the environment names, and never disturb training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlbench_core.client.log_metrics import LogMetrics
from mlbench_core.client.undelivered_metrics import Outbox
from tests.client.stub_master import StubMaster


@pytest.fixture
def master() -> Iterator[StubMaster]:
    stub = StubMaster()
    yield stub
    stub.stop()


@pytest.fixture
def environment() -> Iterator[pytest.MonkeyPatch]:
    """Changes the environment, and closes what was made in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
        yield patch
        LogMetrics.close()


def test_a_metric_has_the_workers_rank_and_epoch(
    master: StubMaster, environment: pytest.MonkeyPatch
) -> None:
    environment.setenv("MLBENCH_MASTER_URL", master.url)
    LogMetrics.log("4", 2, 7, "val_loss", 0.5)
    assert LogMetrics.flush(60)
    (metric,) = master.metrics
    assert (metric["run_id"], metric["name"], metric["value"]) == ("4", "val_loss @ 2", 0.5)
    assert metric["cumulative"] is False
    assert json.loads(metric["metadata"]) == {"rank": 2, "epoch": 7}


def test_metrics_that_are_logged_together_are_written_at_once(
    master: StubMaster, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.setenv("MLBENCH_MASTER_URL", master.url)
    environment.setenv("MLBENCH_SPOOL", str(tmp_path))
    written: list[int] = []
    insert = Outbox.insert

    def counting(outbox: Outbox, rows: Any) -> None:
        written.append(len(rows))
        insert(outbox, rows)

    environment.setattr(Outbox, "insert", counting)
    with LogMetrics.together():
        for value in range(20):
            LogMetrics.log(1, 0, 0, "step", value)
    LogMetrics.log(1, 0, 0, "step", 20)
    # One that cannot be sent does not hold back the others.
    with LogMetrics.together():
        for bad in (21, None, 22):
            LogMetrics.log(1, 0, 0, "step", bad)
    assert LogMetrics.flush(60)
    assert master.values == list(range(23))
    assert written == [20, 1, 1, 1]


def test_without_a_master_nothing_happens(
    environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    LogMetrics.log(1, 0, 0, "loss", 0.5)
    assert LogMetrics.flush(0) is True
    assert caplog.text == ""


def test_tensors_are_numbers(master: StubMaster, environment: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    environment.setenv("MLBENCH_MASTER_URL", master.url)
    LogMetrics.log(1, 0, 0, "loss", torch.tensor(0.5))
    LogMetrics.log(1, 0, 0, "loss", torch.tensor([2]))
    assert LogMetrics.flush(60)
    assert master.values == [0.5, 2]


@pytest.mark.parametrize("value", [None, "several"])
def test_a_value_that_cannot_be_sent_is_a_warning(
    value: Any,
    master: StubMaster,
    environment: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    import numpy as np

    environment.setenv("MLBENCH_MASTER_URL", master.url)
    LogMetrics.log(1, 0, 0, "loss", np.zeros(2) if value == "several" else value)
    assert "could not be sent" in caplog.text
    assert master.metrics == []


def test_a_new_master_in_the_environment_gets_what_is_logged_from_then_on(
    master: StubMaster, environment: pytest.MonkeyPatch
) -> None:
    other = StubMaster()
    try:
        for value, stub in enumerate((master, other, master)):
            environment.setenv("MLBENCH_MASTER_URL", stub.url)
            LogMetrics.log(1, 0, 0, "loss", value)
        assert LogMetrics.flush(60)
        assert (master.values, other.values) == ([0, 2], [1])
    finally:
        LogMetrics.close()
        other.stop()


def test_a_wrong_address_is_one_warning(
    environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environment.setenv("MLBENCH_MASTER_URL", "host:port")
    for value in range(3):
        LogMetrics.log(1, 0, 0, "loss", value)
    assert len(caplog.records) == 1
    assert "url of the master must be" in caplog.text


def test_connecting_loses_no_metric(
    environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environment.setenv("MLBENCH_MASTER_URL", "host:port")
    LogMetrics.connect()
    assert "url of the master must be" in caplog.text
    LogMetrics.log(1, 0, 0, "loss", 1)
    LogMetrics.close()
    assert "1 metric(s) of this process were not reported" in caplog.text


def test_an_outage_is_one_warning_and_loses_nothing(
    master: StubMaster, environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environment.setenv("MLBENCH_MASTER_URL", master.url)
    master.stop()
    for value in range(20):
        LogMetrics.log(1, 0, 0, "loss", value)
    assert LogMetrics.flush(0.5) is False
    assert len(caplog.records) == 1
    master.start()
    assert LogMetrics.flush(60)
    assert master.values == list(range(20))


def test_in_a_cluster_the_master_is_looked_up_once(
    environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from mlbench_core.errors import MasterNotFoundError

    looked_up = []

    def find(*arguments: Any) -> str:
        looked_up.append(arguments)
        raise MasterNotFoundError("no pod")

    environment.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    environment.setattr("mlbench_core.client.api.find_master", find)
    for value in range(3):
        LogMetrics.log(1, 0, 0, "loss", value)
    assert looked_up == [("component=master,app=mlbench", "default", True, True)]
    assert "no pod" in caplog.text


def test_in_a_cluster_without_the_package_kubernetes_the_loss_is_said_twice(
    environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the first metric and at the end, with the line that installs it: a whole run's metrics are
    at stake."""
    environment.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    for name in [name for name in sys.modules if name.split(".")[0] == "kubernetes"]:
        environment.delitem(sys.modules, name)
    environment.setitem(sys.modules, "kubernetes", None)
    for value in range(3):
        LogMetrics.log(1, 0, 0, "loss", value)
    LogMetrics.close()
    LogMetrics.close()
    first, last = (record.getMessage() for record in caplog.records)
    assert {record.levelname for record in caplog.records} == {"ERROR"}
    assert first.startswith(
        "metrics are not reported, the run goes on: this process runs in a Kubernetes cluster"
    )
    assert last.startswith("3 metric(s) of this process were not reported")
    for message in (first, last):
        assert "pip install 'mlbench-core[kubernetes]', or set MLBENCH_MASTER_URL" in message


FORK = """
import os, sys
from mlbench_core.client import api
from mlbench_core.client.log_metrics import LogMetrics
api._FLUSH_AT_EXIT_S = 60.0
LogMetrics.log(1, 0, 0, "loss", "parent")
assert LogMetrics.flush(60)
child = os.fork()
LogMetrics.log(1, 0, 0, "loss", "child" if child == 0 else "parent again")
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_a_client_of_its_own_and_exit_delivers(master: StubMaster) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK],
        env={**os.environ, "MLBENCH_MASTER_URL": master.url},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(master.values) == ["child", "parent", "parent again"]
    assert len(master.deliveries) == 3


def test_importing_makes_no_client_and_loads_no_network(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("MLBENCH_MASTER_URL", "http://127.0.0.1:9")
    code = (
        "import sys, mlbench_core.client.log_metrics as m; "
        "assert not {'requests', 'kubernetes', 'mlbench_core.client.api'} & set(sys.modules); "
        "assert m._shared._client is None"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
