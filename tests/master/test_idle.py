"""A master that was started with ``--end-when-idle`` ends, but only when nothing uses it."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import httpx
import pytest

from mlbench_core.paths import user_folder
from mlbench_master import idle
from mlbench_master.database.store import Store
from tests.master.helpers import server

# A slow machine must manage the first request in this time after the start.
IDLE_S = 3.0


def test_it_ends_after_the_last_run_and_leaves_nothing_held(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with server(data, "--end-when-idle", str(IDLE_S)) as (base, process):
        request = {"name": "r", "num_workers": 1, "command": f"sleep {2 * IDLE_S}"}
        start = time.monotonic()
        assert httpx.post(f"{base}/api/runs/", json=request).status_code == 201
        # Nothing is asked of it meanwhile, and the command posts nothing either: only the run holds
        # it.
        assert process.wait(60) == 0
        assert time.monotonic() - start > 3 * IDLE_S
    log = (tmp_path / "master.log").read_text()
    assert "it ends after 3 s without a run or a request" in log
    assert "the master is ending: no run and no request for 3 s" in log
    assert "Traceback" not in log
    assert not user_folder("master.json").exists()
    store = Store(f"sqlite:///{data / 'master.db'}")
    assert store.lease() is None
    assert store.run(1).state == "finished"  # type: ignore[union-attr]
    store.close()


def test_an_open_dashboard_keeps_it_running(tmp_path: Path) -> None:
    with server(tmp_path / "data", "--end-when-idle", str(IDLE_S)) as (base, process):
        with httpx.stream("GET", f"{base}/api/events/", timeout=60):
            threading.Event().wait(2.5 * IDLE_S)
            # An ending server would wait for the stream, so its end alone does not show that it has
            # begun to end.
            assert process.poll() is None and "ending" not in (tmp_path / "master.log").read_text()
        assert process.wait(60) == 0


def test_time_of_a_suspended_server_is_not_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(idle.time, "monotonic", lambda: now)
    busy = [False]

    async def app(*_: object) -> None: ...

    clock = idle.IdleClock(app, lambda: busy[0])  # type: ignore[arg-type]
    clock.look()
    now += 0.5
    assert clock.look() == 0.5
    now += 3600.0
    assert clock.look() == 1.5
    asyncio.run(clock({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    assert clock.look() == 1.5
    asyncio.run(clock({"type": "http"}, None, None))  # type: ignore[arg-type]
    assert clock.look() == 0.0
    now += 0.5
    busy[0] = True
    assert clock.look() == 0.0
