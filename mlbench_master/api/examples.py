"""Examples of the bodies and answers of the REST API, for its description.

They are what a master accepts and sends: tests send each body, and compare the answers with these.
"""

from __future__ import annotations

from typing import Any

__all__ = ["ANSWERS", "MESSAGES", "REQUESTS"]

_COMMAND = "python train.py --rank {rank} --hosts {hosts} --backend {backend}"
_RUN: dict[str, Any] = {
    "id": 1,
    "name": "my-run",
    "tags": [],
    "note": "",
    "created_at": "2026-01-31T12:00:00.000000Z",
    "started_at": "2026-01-31T12:00:00.250000Z",
    "finished_at": "2026-01-31T12:07:30.500000Z",
    "state": "finished",
    "stopped": False,
    "job_id": "local-1",
    "job_metadata": {"command": _COMMAND, "stdout": ["epoch 3: 0.25"], "stderr": [], "notes": []},
    "num_workers": 2,
    "num_cpus": 1.0,
    "max_bandwidth": 1000.0,
    "image": "",
    "backend": "gloo",
    "run_all_nodes": True,
    "command": _COMMAND,
    "gpu_enabled": False,
    "light_target": False,
    "goal_result": "Reached in 407.1 s",
    "goal": {
        "metric": "val_global_Prec@1",
        "threshold": 95.0,
        "minimize": False,
        "budget_s": None,
        "reached": True,
        "value": 95.3,
        "time_to_goal_s": 407.12,
        "unit": "epochs",
        "epochs": 3,
        "steps": 1173,
        "phases_s": {"compute": 350.0, "communication": 50.0, "metrics": 5.0, "data": 2.12},
    },
}
_NEW_RUN: dict[str, Any] = {
    **_RUN,
    "started_at": None,
    "finished_at": None,
    "state": "initialized",
    "job_id": "",
    "job_metadata": {"command": _COMMAND, "stdout": [], "stderr": [], "notes": []},
    "goal_result": None,
    "goal": None,
}
_HEALTH = {"status": "ok", "version": "4.0.0", "engine": "local", "most_workers": 8}
_CURVE = {
    "name": "train_loss @ 0",
    "count": 3,
    "time_s": [0.5, 1.5, 2.5],
    "epoch": [1.0, 2.0, None],
    "step": [0, 1, 2],
    "value": [0.5, 0.25, None],
}
_POINT = {"date": "2026-01-31T12:00:01.500000Z", "value": "0.25", "cumulative": False}
_FULL_POINT = {**_POINT, "name": "train_loss @ 0", "metadata": '{"rank": 0, "epoch": 1}'}
_METRIC = {
    "run_id": 1,
    "name": "train_loss @ 0",
    "date": "2026-01-31T12:00:01.5Z",
    "value": 0.25,
    "cumulative": False,
    "metadata": '{"rank": 0, "epoch": 1}',
}

REQUESTS: dict[tuple[str, str], dict[str, Any]] = {
    ("post", "/api/metrics/"): {
        "One metric of a run": _METRIC,
        "One metric of a worker": {
            "pod_name": "my-run-worker-0",
            "name": "cpu",
            "value": "97.5",
            "date": "2026-01-31 12:00",
        },
        "Many metrics, each stored once even if this is sent again": [
            {**_METRIC, "id": "worker-0-1"},
            {
                **_METRIC,
                "id": "worker-0-2",
                "date": "2026-01-31T12:00:02.5+00:00",
                "value": "0.125",
            },
        ],
    },
    ("post", "/api/runs/"): {
        "A command": {"name": "my-run", "num_workers": 2, "command": _COMMAND},
        "A task": {
            "name": "my-task",
            "num_workers": 2,
            "num_cpus": 1,
            "task": "1a",
            "arguments": "--epochs 3",
            "light_target": True,
        },
        # With custom_image_name, this needs an engine with containers.
        "A command of your own, in the fields of version 3.0": {
            "name": "my-command",
            "num_workers": 2,
            "num_cpus": 0.5,
            "max_bandwidth": 1000,
            "image_name": "custom_image",
            "custom_image_command": (
                "python /app/main.py --run_id {run_id} --rank {rank} --hosts {hosts}"
            ),
            "backend": "custom_backend",
            "custom_backend": "my-backend",
            "run_all_nodes": False,
            "gpu_enabled": False,
            "light_target": False,
        },
    },
    ("patch", "/api/runs/{run_id}/"): {
        "Both": {"tags": "paper, baseline", "note": "the machine was busy"},
    },
    ("post", "/api/runs/import/"): {
        "A finished run": {
            "fingerprint": "0123456789abcdef" * 4,
            "name": "imported",
            "state": "finished",
            "created_at": "2026-01-31T12:00:00Z",
            "finished_at": "2026-01-31T12:07:30.5Z",
            "num_workers": 2,
            "backend": "gloo",
            "command": "python train.py",
        },
    },
}
"""JSON bodies by method and path, with a title each. Those without lists are forms as well."""

ANSWERS: dict[tuple[str, str], dict[str, Any]] = {
    ("get", "/api/health/"): {"A master that works": _HEALTH},
    ("get", "/api/pods/"): {
        "A worker": [
            {
                "name": "my-run-worker-0",
                "labels": (
                    '{"app": "mlbench", "component": "worker", "run": "my-run", '
                    '"run_id": "1", "rank": "0"}'
                ),
                "phase": "Running",
                "ip": "127.0.0.1",
            }
        ]
    },
    ("get", "/api/pods/{name}/curves/"): {
        "One metric": {"curves": [{**_CURVE, "name": "cpu"}], "last_id": 3}
    },
    ("get", "/api/events/"): {
        "A run starts": (
            ': connected\n\nevent: state\ndata: {"id": 1, "name": "my-run", "state": "started"}\n\n'
        )
    },
    ("get", "/api/metrics/"): {
        "A metric of a worker and one of a run": {
            "pod_metrics": {
                "my-run-worker-0": {"cpu": [{**_FULL_POINT, "name": "cpu", "metadata": ""}]}
            },
            "run_metrics": {"my-run": {"train_loss @ 0": [_FULL_POINT]}},
        }
    },
    ("post", "/api/metrics/"): {
        "One metric of a run": {**_METRIC, **_FULL_POINT, "pod_name": None, "id": None},
        "Many metrics, of which one was stored before": {"status": "ok", "received": 2, "added": 1},
    },
    ("get", "/api/metrics/{owner_id}/"): {"One metric": {"train_loss @ 0": [_POINT]}},
    ("get", "/api/runs/"): {"A run": [{**_RUN, "job_metadata": _NEW_RUN["job_metadata"]}]},
    ("post", "/api/runs/"): {"A run that waits": _NEW_RUN},
    ("post", "/api/runs/import/"): {
        "A finished run": {
            **_NEW_RUN,
            "name": "imported",
            "started_at": "2026-01-31T12:00:00.000000Z",
            "finished_at": "2026-01-31T12:07:30.500000Z",
            "state": "finished",
            "job_metadata": {
                "command": "python train.py",
                "stdout": [],
                "stderr": [],
                "notes": ["imported from a result folder"],
                "fingerprint": "0123456789abcdef" * 4,
            },
            "command": "python train.py",
        }
    },
    ("get", "/api/runs/{run_id}/"): {"A finished run": _RUN},
    ("patch", "/api/runs/{run_id}/"): {
        "A run that waits": {
            **_NEW_RUN,
            "tags": ["paper", "baseline"],
            "note": "the machine was busy",
        }
    },
    ("post", "/api/runs/{run_id}/stop/"): {
        "A run that had not started": {
            **_NEW_RUN,
            "finished_at": "2026-01-31T12:01:00.000000Z",
            "state": "failed",
            "stopped": True,
            "job_metadata": {**_NEW_RUN["job_metadata"], "reason": "stopped by a user"},
        }
    },
    ("get", "/api/runs/{run_id}/logs/"): {
        "A line": {
            "lines": [
                {
                    "line": 0,
                    "rank": 0,
                    "stream": "stdout",
                    "text": "epoch 1: 0.5",
                    "date": "2026-01-31T12:00:01.500000Z",
                }
            ],
            "next": 1,
            "previous": 0,
            "matches": 1,
        }
    },
    ("get", "/api/runs/{run_id}/curves/"): {"One metric": {"curves": [_CURVE], "last_id": 3}},
    ("get", "/api/runs/{run_id}/result/"): {"Its beginning": {"schema_version": 1}},
}
"""Answers to requests that succeed, by method and path, with a title each."""

MESSAGES: dict[int | tuple[int, str, str], str] = {
    400: "limit: Input should be greater than or equal to 1 (got '0')",
    (
        400,
        "get",
        "/api/metrics/{owner_id}/",
    ): "last_n: Input should be greater than or equal to 1 (got '0')",
    (
        400,
        "get",
        "/api/runs/{run_id}/logs/",
    ): "since_line: Input should be greater than or equal to 0 (got '-1')",
    (
        400,
        "get",
        "/api/pods/{name}/curves/",
    ): "points: Input should be greater than or equal to 1 (got '0')",
    (
        400,
        "get",
        "/api/runs/{run_id}/curves/",
    ): "points: Input should be greater than or equal to 1 (got '0')",
    (400, "post", "/api/metrics/"): "value: is required",
    (400, "patch", "/api/runs/{run_id}/"): (
        "tags.0: must not contain a comma, which separates tags (got 'a,b')"
    ),
    (400, "post", "/api/runs/"): "num_workers: Input should be greater than or equal to 1 (got 0)",
    (
        400,
        "post",
        "/api/runs/import/",
    ): "state: Input should be 'finished' or 'failed' (got 'lost')",
    401: "Authorization: send the master's token as 'Bearer TOKEN'",
    403: "Origin: 'https://example.org' may not write to this master",
    404: "id: there is no run '77'",
    (
        404,
        "get",
        "/api/metrics/{owner_id}/",
    ): "id: there is no pod '77'; for a run's metrics add metric_type=run",
    (
        404,
        "get",
        "/api/pods/{name}/curves/",
    ): "id: there is no pod '77'; for a run's metrics add metric_type=run",
    (404, "post", "/api/metrics/"): "run_id: there is no run 77",
    408: "the request did not arrive within 10 s",
    409: "name: there is a run named 'my-run'; choose another name or delete that run",
    (409, "post", "/api/runs/import/"): (
        "fingerprint: it was imported before as 'imported' (id 2); delete that run to import "
        "it again"
    ),
    (
        413,
        "patch",
        "/api/runs/{run_id}/",
    ): "body: must have at most 131072 bytes: send it in parts",
    413: "body: must have at most 2097152 bytes: send it in parts",
    (413, "post", "/api/metrics/"): "body: must have at most 16777216 bytes: send it in parts",
    415: (
        "Content-Type: must be application/json or application/x-www-form-urlencoded, not "
        "'multipart/form-data'"
    ),
    429: "Authorization: too many wrong tokens came from this address; try again in a minute",
    503: "the database failed: database is locked; try again",
}
"""Messages of errors by status, or by status, method and path if an operation has another one."""
