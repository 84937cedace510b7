"""Fields that the API does not have are refused by name, and those of version 3.0's pages are
not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.master.helpers import TestClient

RUN = {"name": "a", "num_workers": 1, "command": "true"}
METRIC = {"run_id": 1, "name": "loss", "value": 0.5}


@pytest.mark.parametrize(
    ("field", "hint"),
    [
        ("use_horovod", "the fields are name, num_workers, num_cpus, "),
        ("num_cpu", "did you mean 'num_cpus'?"),
        ("Max_Bandwidth", "did you mean 'max_bandwidth'?"),
        ("light", "did you mean 'light_target'?"),
        ("arguements", "did you mean 'arguments'?"),
    ],
)
@pytest.mark.parametrize("how", ["json", "data"])
def test_a_run_with_an_unknown_field_is_not_started(
    client: TestClient, how: Any, field: str, hint: str
) -> None:
    answer = client.post("/api/runs/", **{how: {**RUN, field: "1"}})
    assert answer.status_code == 400
    assert answer.json()["message"].startswith(f"{field}: is not a field, and would be ignored: ")
    assert hint in answer.json()["message"]
    assert client.get("/api/runs/").json() == []


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"command": "true", "custom_backend": "x"}, "custom_backend"),
        ({"image_name": "mlbench/pytorch-cifar10-resnet20-all-reduce:latest",
         "custom_image_name": "a/b"},
         "custom_image_name"),
        ({"image_name": "mlbench/pytorch-cifar10-resnet20-all-reduce:latest",
         "custom_image_command": "/x"},
         "custom_image_command"),
        ({"command": "true", "arguments": ["--epochs", "3"]}, "arguments"),
    ],
)  # fmt: skip
def test_a_field_that_would_be_ignored_beside_another_one_is_refused(
    client: TestClient, values: dict[str, Any], field: str
) -> None:
    answer = client.post("/api/runs/", json={"name": "a", "num_workers": 1, **values})
    assert answer.status_code == 400
    assert answer.json()["message"].startswith(f"{field}: must be left out")


@pytest.mark.parametrize("items", [METRIC, [METRIC, {**METRIC, "runid": 1}]])
def test_a_metric_with_an_unknown_field_is_not_stored(client: TestClient, items: Any) -> None:
    client.post("/api/runs/", json=RUN)
    if isinstance(items, dict):
        items = {**items, "runid": 1}
    answer = client.post("/api/metrics/", json=items)
    assert answer.status_code == 400
    assert (
        "runid: is not a field, and would be ignored: did you mean 'run_id'?"
        in answer.json()["message"]
    )
    assert client.get("/api/metrics/1/?metric_type=run").json() == {}


@pytest.mark.parametrize(
    "path",
    ["/api/runs/?sate=failed", "/api/pods/?limt=3", "/api/metrics/1/?metric_type=run&lastn=1",
     "/api/runs/1/logs/?rnak=0", "/api/runs/1/curves/?metrics=a"],
)  # fmt: skip
def test_an_unknown_parameter_of_a_query_is_refused(client: TestClient, path: str) -> None:
    client.post("/api/runs/", json=RUN)
    answer = client.get(path)
    assert answer.status_code == 400
    assert "is not a field, and would be ignored: did you mean " in answer.json()["message"]


def test_empty_fields_and_those_of_the_pages_of_version_3_are_taken(client: TestClient) -> None:
    answer = client.post("/api/runs/", data={**RUN, "csrfmiddlewaretoken": "x", "use_horovod": ""})
    assert answer.status_code == 201
    assert client.get("/api/runs/?format=json&_=158").status_code == 200
