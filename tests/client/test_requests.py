"""What the client asks of the master, and what it refuses to ask."""

from __future__ import annotations

import datetime
import inspect
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from mlbench_core.client.api import MLBENCH_BACKENDS, MLBENCH_IMAGES, ApiClient
from mlbench_core.errors import MasterRequestError
from tests.client.stub_master import StubMaster

Connect = Callable[..., ApiClient]
Call = Callable[[ApiClient], Any]


@pytest.mark.parametrize(
    ("call", "method", "path", "query"),
    [
        (lambda c: c.get_all_metrics(), "GET", "/api/metrics/", {}),
        (lambda c: c.get_run_metrics(3), "GET", "/api/metrics/3/", {"metric_type": "run"}),
        (
            lambda c: c.get_run_metrics("3", "2026-01-01T00:00:00Z", 10, "train_loss @ 0", 5),
            "GET",
            "/api/metrics/3/",
            {
                "metric_type": "run",
                "since": "2026-01-01T00:00:00Z",
                "summarize": "10",
                "metric_filter": "train_loss @ 0",
                "last_n": "5",
            },
        ),
        (
            lambda c: c.get_pod_metrics("worker-0", datetime.datetime(2026, 1, 2), 4),
            "GET",
            "/api/metrics/worker-0/",
            {"metric_type": "pod", "since": "2026-01-02T00:00:00.000000Z", "summarize": "4"},
        ),
        (
            lambda c: c.download_run_metrics(3, summarize=7),
            "GET",
            "/api/metrics/3/",
            {"metric_type": "run", "format": "zip", "summarize": "7"},
        ),
        (lambda c: c.get_runs(), "GET", "/api/runs/", {}),
        (lambda c: c.get_run(3), "GET", "/api/runs/3/", {}),
        (lambda c: c.get_run("a/../b"), "GET", "/api/runs/a%2F..%2Fb/", {}),
        (lambda c: c.delete_run(3), "DELETE", "/api/runs/3/", {}),
        (lambda c: c.stop_run(3), "POST", "/api/runs/3/stop/", {}),
        (lambda c: c.get_run_logs(3, 12), "GET", "/api/runs/3/logs/", {"since_line": "12"}),
        (lambda c: c.get_worker_pods(), "GET", "/api/pods/", {}),
    ],
)
def test_requests(
    call: Call, method: str, path: str, query: dict[str, str], master: StubMaster, connect: Connect
) -> None:
    assert call(connect()).result(60).status_code == 200
    ((seen_method, target, headers, _),) = master.requests
    assert (seen_method, urlsplit(target).path) == (method, path)
    assert {key: value for key, (value,) in parse_qs(urlsplit(target).query).items()} == query
    assert "Authorization" not in headers


@pytest.mark.parametrize(
    ("token", "sent"), [(None, "Bearer from-environment"), ("given", "Bearer given")]
)
def test_the_token_goes_with_every_request(
    token: str | None, sent: str, master: StubMaster, connect: Connect
) -> None:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("MLBENCH_TOKEN", "from-environment")
        client = connect(token=token)
    client.get_runs().result(60)
    client.post_metric(1, "m", 1).result(60)
    assert [headers["Authorization"] for _, _, headers, _ in master.requests] == [sent, sent]


def test_an_error_status_is_an_answer(master: StubMaster, connect: Connect) -> None:
    master.respond = lambda method, path, body: (409, {"message": "in use"})
    response = connect().create_run("taken", 2, task="1a").result(60)
    assert (response.status_code, response.json()["message"]) == (409, "in use")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda c: c.stop_run(3),
            "cannot stop a run and keep its metrics; delete_run stops it .*version 3.0",
        ),
        (
            lambda c: c.get_run_logs(3),
            "has no logs; the last lines are in job_metadata .*version 3.0",
        ),
    ],
)
@pytest.mark.parametrize("answer", [b"<h1>Not Found</h1>", {"detail": "Not found."}])
def test_what_an_old_master_cannot_do_is_a_clear_error(
    call: Call, words: str, answer: Any, master: StubMaster, connect: Connect
) -> None:
    master.respond = lambda method, path, body: (404, answer)
    with pytest.raises(MasterRequestError, match=words) as caught:
        call(connect()).result(60)
    assert caught.value.status == 404
    master.respond = lambda method, path, body: (
        404,
        {"status": "Not Found", "message": "id: there is no run '3'"},
    )
    assert (
        call(connect()).result(60).status_code == 404
    )  # this version's master: the run is missing


def test_reading_is_repeated_and_starting_a_run_is_not(
    master: StubMaster, connect: Connect
) -> None:
    master.respond = lambda method, path, body: (503, {}) if len(master.requests) < 3 else None
    client = connect()
    assert client.get_runs().result(60).status_code == 200
    assert len(master.requests) == 3
    master.requests.clear()
    assert client.create_run("new", 2, task="1a").result(60).status_code == 503
    assert len(master.requests) == 1


CUSTOM = {"custom_image_name": "me/mine:1", "custom_image_command": "python main.py {run_id}"}
TASK_1A = {"task": "1a", "arguments": []}
NAMED_IMAGES = {
    name: image[0] for name, image in MLBENCH_IMAGES.items() if image[0] != "custom_image"
}


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        ({"task": "1a"}, {**TASK_1A, "backend": "gloo"}),
        (
            {"task": "1a", "arguments": ["--lr", 0.1]},
            {"task": "1a", "arguments": ["--lr", "0.1"], "backend": "gloo"},
        ),
        (CUSTOM, {"image_name": "custom_image", "backend": "gloo", **CUSTOM}),
        (
            {"image": "Custom Image", **CUSTOM},
            {"image_name": "custom_image", "backend": "gloo", **CUSTOM},
        ),
        (
            {"image": "custom_image", **CUSTOM},
            {"image_name": "custom_image", "backend": "gloo", **CUSTOM},
        ),
        *[
            ({"image": name}, {"image_name": image, "backend": "gloo"})
            for name, image in NAMED_IMAGES.items()
        ],
        *[
            ({"image": image}, {"image_name": image, "backend": "gloo"})
            for image in NAMED_IMAGES.values()
        ],
        *[
            ({"task": "1a", "backend": name}, {**TASK_1A, "backend": name.lower()})
            for name in MLBENCH_BACKENDS[:-1]
        ],
        ({"task": "1a", "backend": "Gloo"}, {**TASK_1A, "backend": "gloo"}),
        (
            {"task": "1a", "custom_backend": "ucc", "run_all_nodes": True},
            {
                **TASK_1A,
                "backend": "custom_backend",
                "custom_backend": "ucc",
                "run_all_nodes": "true",
            },
        ),
        (
            {"task": "1a", "backend": MLBENCH_BACKENDS[-1], "custom_backend": "ucc"},
            {
                **TASK_1A,
                "backend": "custom_backend",
                "custom_backend": "ucc",
                "run_all_nodes": "false",
            },
        ),
    ],
)
def test_a_run_is_created_with_what_the_master_takes(
    options: dict[str, Any], sent: dict[str, Any], master: StubMaster, connect: Connect
) -> None:
    connect().create_run("my-run", 4, 1.5, 100, gpu_enabled=True, **options).result(60)
    ((method, path, _, body),) = master.requests
    assert (method, path) == ("POST", "/api/runs/")
    assert body == {
        "name": "my-run",
        "num_workers": 4,
        "num_cpus": 1.5,
        "max_bandwidth": 100,
        "gpu_enabled": "true",  # text: the master of version 3.0 compares with "true"
        "light_target": "false",
        **sent,
    }


def test_images_and_backends_are_the_tuples_and_the_list_of_version_3() -> None:
    assert (
        MLBENCH_IMAGES["PyTorch Cifar-10 ResNet-20"][0]
        == "mlbench/pytorch-cifar10-resnet20-all-reduce:latest"
    )
    assert MLBENCH_IMAGES["PyTorch Linear Logistic Regression"][0].startswith(
        "mlbench/pytorch-epsilon-logistic-reg"
    )
    assert MLBENCH_IMAGES["Custom Image"][0] == "custom_image"
    assert MLBENCH_BACKENDS[0] == "MPI"
    assert all(isinstance(image, tuple) for image in MLBENCH_IMAGES.values()) and isinstance(
        MLBENCH_BACKENDS, list
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "nothing to run"),
        (
            {"image": "nonsense"},
            "image must be one of .*PyTorch Cifar-10 ResNet-20.*, not 'nonsense'",
        ),
        ({"image": "custom_image"}, "needs custom_image_name and custom_image_command"),
        ({"custom_image_name": "me/mine:1"}, "needs custom_image_name and custom_image_command"),
        ({"image": "PyTorch WMT16 GNMT", **CUSTOM}, "give one of them"),
        ({"task": "1a", "image": "PyTorch WMT16 GNMT"}, "give one of them"),
        (
            {"image": "PyTorch WMT16 GNMT", "arguments": ["--x"]},
            "arguments must be left out without a task",
        ),
        (
            {"task": "1a", "arguments": "--lr 1"},
            r"must be a list, not the text '--lr 1': give \['--lr', '1'\]",
        ),
        ({"task": "1a", "backend": "tcp"}, "backend must be one of MPI, GLOO, .*, not 'tcp'"),
        ({"task": "1a", "backend": "Custom Backend"}, "needs custom_backend"),
        ({"task": "1a", "backend": "gloo", "custom_backend": "ucc"}, "give one of them"),
        ({"task": "1a", "num_workers": 0}, "num_workers must be at least 1, not 0"),
        ({"task": "1a", "num_cpus": 0}, "num_cpus must be a positive number, not 0"),
        ({"task": "1a", "num_cpus": float("inf")}, "num_cpus must be a positive number, not inf"),
        ({"task": "1a", "max_bandwidth": -1}, "max_bandwidth must be a positive number .*not -1"),
    ],
)
def test_a_run_that_cannot_be_is_refused_at_once(
    options: dict[str, Any], message: str, master: StubMaster, connect: Connect
) -> None:
    with pytest.raises(ValueError, match=message):
        connect().create_run(**{"name": "my-run", "num_workers": 2, **options})
    assert master.requests == []


def test_a_metric_is_sent_as_the_master_takes_it(master: StubMaster, connect: Connect) -> None:
    zone = datetime.timezone(datetime.timedelta(hours=2))
    connect().post_metric(
        9, "loss @ 1", 0.5, True, {"epoch": 3}, datetime.datetime(2026, 1, 2, 3, 4, 5, 6, zone)
    ).result(60)
    (metric,) = master.metrics
    assert len(metric.pop("id")) == 32
    assert metric == {
        "run_id": 9,
        "name": "loss @ 1",
        "value": 0.5,
        "cumulative": True,
        "metadata": '{"epoch": 3}',
        "date": "2026-01-02T01:04:05.000006Z",
    }


def test_the_date_is_now_in_utc(master: StubMaster, connect: Connect) -> None:
    before = datetime.datetime.now(datetime.timezone.utc)
    connect().post_metric(9, "loss @ 1", 0.5).result(60)
    date = datetime.datetime.strptime(master.metrics[0]["date"], "%Y-%m-%dT%H:%M:%S.%fZ")
    assert (
        before
        <= date.replace(tzinfo=datetime.timezone.utc)
        <= datetime.datetime.now(datetime.timezone.utc)
    )


@pytest.mark.parametrize(
    ("value", "sent"),
    [
        (1, 1),
        (0.25, 0.25),
        ("reached", "reached"),
        (True, True),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (float("-inf"), "-inf"),
        ((1, 2), "(1, 2)"),
    ],
)
def test_values_survive_json(value: Any, sent: Any, master: StubMaster, connect: Connect) -> None:
    connect().post_metric(1, "m", value).result(60)
    assert master.values == [sent]


def test_scalars_of_numpy_and_one_element_arrays_are_numbers(
    master: StubMaster, connect: Connect
) -> None:
    import numpy as np

    client = connect()
    client.post_metrics(
        [
            {"run_id": 1, "name": "m", "value": value}
            for value in (np.float32(0.5), np.int64(3), np.array([2.0]))
        ]
    ).result(60)
    assert master.values == [0.5, 3, 2.0]


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ({"name": ""}, "name must be .*not ''"),
        ({"run_id": ""}, "run_id must be .*not ''"),
        ({"run_id": None}, "run_id must be .*not None"),
        ({"pod_name": "w"}, "give one of them"),
        ({"value": None}, "value must be a number or a text, not None"),
        ({"vaule": 1}, "has no 'vaule'"),
    ],
)
def test_a_wrong_metric_is_refused_at_once(
    metric: dict[str, Any], message: str, master: StubMaster, connect: Connect
) -> None:
    client = connect()
    with pytest.raises(ValueError, match=message):
        client.post_metrics(
            [
                {"run_id": 1, "name": "m", "value": 1},
                {"run_id": 1, "name": "m", "value": 1, **metric},
            ]
        )
    assert client.flush(60)
    assert master.requests == []


def test_no_metrics_at_all_are_refused(connect: Connect) -> None:
    with pytest.raises(ValueError, match="at least one entry"):
        connect().post_metrics([])


@pytest.mark.parametrize("option", [{"summarize": 0}, {"last_n": 0}])
def test_limits_must_be_positive(option: dict[str, Any], connect: Connect) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        connect().get_run_metrics(1, **option)


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("10.0.0.7:80", "http://10.0.0.7:80/api/"),
        ("http://10.0.0.7:80", "http://10.0.0.7:80/api/"),
        ("http://10.0.0.7:80/", "http://10.0.0.7:80/api/"),
        ("http://10.0.0.7:80/api", "http://10.0.0.7:80/api/"),
        ("http://10.0.0.7:80/api/", "http://10.0.0.7:80/api/"),
        ("localhost", "http://localhost/api/"),
        ("[::1]:5080", "http://[::1]:5080/api/"),
        ("https://example.org/mlbench/", "https://example.org/mlbench/api/"),
    ],
)
def test_the_endpoint_of_a_url(url: str, endpoint: str) -> None:
    with ApiClient(url=url) as client:
        assert client.endpoint == endpoint


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://",
        "ftp://host:1",
        "host:port",
        "host:99999",
        "host:0",
        "a b:80",
        "host:1/?x=1",
        "u:p@host:1",
    ],
)
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="url of the master must be"):
        ApiClient(url=url)


@pytest.mark.parametrize(
    "options", [{"max_workers": 0}, {"timeout_s": 0}, {"timeout_s": float("inf")}]
)
def test_limits_of_the_client_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        ApiClient(url="localhost:1", **options)


def test_old_arguments_keep_their_places() -> None:
    parameters = list(inspect.signature(ApiClient).parameters)
    assert parameters[:6] == [
        "max_workers",
        "in_cluster",
        "label_selector",
        "k8s_namespace",
        "url",
        "load_config",
    ]
