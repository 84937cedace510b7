"""The client and the master itself: the outage of a real process."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlbench_core.client.api import ApiClient
from tests.helpers.processes import running_master

pytest.importorskip("fastapi", reason="needs the extra 'master'")


def test_a_killed_and_restarted_master_has_every_metric_once_and_in_order(tmp_path: Path) -> None:
    with (
        running_master(tmp_path / "master") as master,
        ApiClient(url=master.url, spill_dir=tmp_path, timeout_s=60) as client,
    ):
        created = client.create_run(
            "my-run",
            1,
            num_cpus=1,
            custom_image_name="custom_image",
            custom_image_command="true",
            backend="Gloo",
        ).result(60)
        assert created.status_code == 201, created.text
        run_id = created.json()["id"]
        for value in range(300):
            if value == 100:
                master.stop(kill=True)
            client.post_metric(run_id, "loss @ 0", value)
        assert not client.flush(0.2)
        master.start()
        assert client.flush(60)
        assert master.metric_values(run_id, "loss @ 0") == [str(value) for value in range(300)]
        assert client.delete_run(run_id).result(60).status_code == 204
