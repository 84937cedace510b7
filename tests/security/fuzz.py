"""Send random requests to a master, and check that none is an error of the master and that every
row can be read.

python -m tests.security.fuzz --cases 20000 [--seed 0]
python -m tests.security.fuzz --cases 20000 --schemathesis PROGRAM

The master runs in this process with an engine that starts nothing, since a random command must not
run. The first form sends random dates, numbers, texts, encodings and sizes; the second one lets
schemathesis derive requests from the description of the API (`pip install schemathesis`, in an
environment of its own)."""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from mlbench_master import create_app
from tests.master.helpers import IdleEngine, TestClient

# Without the checks whether wrong data is always refused and right data never: as in version 3.0,
# an empty field counts as left out and numbers may be text, and not every rule between two fields
# can be described.
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance,unsupported_method,allow_header_conformance,ignored_auth,use_after_free"
)
TOKEN = "sesame"


class Values:
    """Random values, most of them near a limit or of a surprising type."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def number(self) -> Any:
        near = self.random.choice(
            [0, 1, 127, 2**15, 2**31, 2**32, 2**53, 2**63, 2**64, 10**18, 10**308, 10**400]
        )
        choice = self.random.randrange(6)
        if choice == 0:
            return near + self.random.randint(-2, 2)
        if choice == 1:
            return -near
        if choice == 2:
            return self.random.choice(
                [float("nan"), float("inf"), -float("inf"), -0.0, 5e-324, 1.5, 1e308, 1e18]
            )
        if choice == 3:
            return self.random.choice(
                ["1_000", " 7 ", "+7", "0x10", "٣", "1e3", "1,5", "NaN", "", "-", "9" * 5000, "07"]
            )
        if choice == 4:
            return self.random.uniform(-1e19, 1e19)
        return self.random.randint(1, 40)

    def date(self) -> Any:
        choice = self.random.randrange(8)
        if choice == 0:
            return self.number()
        year = self.random.choice(
            [
                "0000",
                "0001",
                "1969",
                "1970",
                "2026",
                "2038",
                "9999",
                "10000",
                "-001",
                "٢٠٢٦",
                "99999",
            ]
        )
        month, day = (
            self.random.choice(["00", "01", "02", "12", "13"]),
            self.random.choice(["00", "01", "29", "31", "32"]),
        )
        text = f"{year}-{month}-{day}"
        if choice == 1:
            return text
        text += self.random.choice(["T", " ", "t", "  ", "_", "+"])
        text += self.random.choice(
            ["00:00", "23:59:59", "24:00:00", "23:59:60", "12", "12:30:30.5", "12:30:30,123456789"]
        )
        text += self.random.choice(
            [
                "",
                "Z",
                "z",
                "+00",
                "+23:59",
                "-23:59",
                "+24:00",
                "-12:00",
                " 0200",
                "+0530",
                "+99:99",
            ]
        )
        if choice == 2:
            return self.random.choice(
                [[text], {"date": text}, text.encode().hex(), f" {text} ", f"{text}\n", text[:-1]]
            )
        return text

    def text(self) -> Any:
        choice = self.random.randrange(9)
        if choice == 0:
            return self.number()
        if choice == 1:
            return "".join(
                chr(self.random.randrange(0x110000)) for _ in range(self.random.randrange(20))
            )
        if choice == 2:
            return self.random.choice(
                ["a", "é", "漢", "\U0001f600", "\\", '"', ","]
            ) * self.random.choice([254, 255, 256, 65_535, 65_536, 65_537])
        if choice == 3:
            return self.random.choice(
                [
                    "\x00",
                    "a\x00b",
                    "\ud800",
                    "\udfff\ud800",
                    "\x1b[31m",
                    "\r\n",
                    "\u2028",
                    "\ufeff",
                    "%00",
                    "..%2f",
                    "' OR 1=1 --",
                    "<script>",
                    "{{ 7*7 }}",
                    "$(id)",
                    "'",
                    '"',
                    "\x7f",
                    "\u202e",
                    "",
                ]
            )
        if choice == 4:
            return self.random.choice(
                [None, True, [], {}, [[]], {"a": {"b": [1, None, float("nan")]}}, [1, "x"]]
            )
        return f"m{self.random.randrange(20)} @ {self.random.randrange(3)}"

    def name(self) -> Any:
        return self.text() if self.random.random() < 0.3 else f"r{self.random.randrange(10**6)}"

    def metric(self, runs: Sequence[int]) -> dict[str, Any]:
        metric: dict[str, Any] = {"name": "m", "value": "1"}
        if self.random.random() < 0.85:
            metric["run_id"] = (
                self.random.choice(runs) if self.random.random() < 0.9 else self.number()
            )
        else:
            metric["pod_name"] = "pod-1" if self.random.random() < 0.6 else self.text()
        # Few wrong fields at once: otherwise almost everything would be refused for its first one.
        for field in self.random.sample(
            ["name", "value", "date", "metadata", "cumulative", "id", "extra"],
            self.random.randrange(4),
        ):
            metric[field] = (
                self.date()
                if field == "date"
                else self.number()
                if field == "value"
                else self.text()
            )
        return metric

    def run(self) -> dict[str, Any]:
        run: dict[str, Any] = {"name": self.name(), "num_workers": 1, "command": "true"}
        fields = [
            "num_workers",
            "num_cpus",
            "max_bandwidth",
            "task",
            "arguments",
            "command",
            "image_name",
            "backend",
        ]
        fields += [
            "custom_image_name",
            "custom_image_command",
            "custom_backend",
            "run_all_nodes",
            "gpu_enabled",
        ]
        for field in self.random.sample(fields, self.random.randrange(4)):
            run[field] = self.number() if field.startswith(("num_", "max_")) else self.text()
        return run

    def encoded(self, body: Any) -> tuple[bytes, str]:
        """A body in a random encoding, and a content type that may not fit it."""
        kind = self.random.choice(
            ["application/json"] * 6
            + ["application/x-www-form-urlencoded"] * 3
            + [
                "text/plain",
                "x/y",
                "",
                "multipart/form-data; boundary=B",
                "application/json; charset=utf-16",
            ]
        )
        if kind.startswith("application/x-www") and isinstance(body, dict):
            pairs = {
                key: value if isinstance(value, str) else json.dumps(value)
                for key, value in body.items()
            }
            content = urlencode(pairs, errors="surrogatepass").encode()
        else:
            text = json.dumps(body, ensure_ascii=self.random.random() < 0.7)
            content = text.encode(
                self.random.choice(["utf-8"] * 8 + ["utf-8-sig", "utf-16"]), "surrogatepass"
            )
        if self.random.random() < 0.1:
            position = self.random.randrange(len(content) + 1)
            junk = self.random.choice(
                [
                    b"",
                    b"\xff",
                    b"\x00",
                    b"[" * 2000,
                    b"{" * 100,
                    b"&" * 3000,
                    b"%",
                    b"%zz",
                    b"=",
                    b'"',
                ]
            )
            content = content[:position] + junk + content[position + self.random.randrange(3) :]
        return content, kind

    def query(self) -> str:
        names = self.random.sample(
            [
                "since",
                "summarize",
                "metric_filter",
                "last_n",
                "format",
                "metric_type",
                "limit",
                "after",
                "since_line",
            ],
            3,
        )
        return urlencode(
            {name: self.date() if name == "since" else self.number() for name in names},
            errors="replace",
        )


def refused_well(answer: Any) -> bool:
    return answer.status_code < 400 or set(answer.json()) == {"status", "message"}


def fuzz(folder: Path, cases: int, seed: int) -> Counter[int]:
    """Send random requests to a master in this process.

    Returns:
        The number of answers by status.

    Raises:
        AssertionError: An answer was an error of the master, or a row that was stored cannot be
            read.
    """
    values = Values(seed)
    app = create_app(data_dir=folder, engine=IdleEngine(), token=TOKEN)
    statuses: Counter[int] = Counter()
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with TestClient(
        app, base_url="http://127.0.0.1:5080", headers=headers, raise_server_exceptions=False
    ) as client:
        runs = [
            client.post(
                "/api/runs/", json={"name": f"base-{n}", "num_workers": 2, "command": "true"}
            ).json()["id"]
            for n in range(3)
        ]
        stored = 0
        for _ in range(cases):
            if values.random.random() < 0.85:
                many = values.random.random() < 0.2
                body: Any = (
                    [values.metric(runs) for _ in range(values.random.randrange(4))]
                    if many
                    else values.metric(runs)
                )
                path = "/api/metrics/"
            else:
                body, path = values.run(), "/api/runs/"
            content, kind = values.encoded(body)
            answer = client.post(
                path, content=content, headers={"Content-Type": kind} if kind else {}
            )
            assert answer.status_code < 500 and refused_well(answer), (
                answer.status_code,
                answer.text[:500],
                content[:2000],
                kind,
            )
            statuses[answer.status_code] += 1
            if path == "/api/metrics/" and answer.status_code == 201:
                stored += answer.json().get("added", 1)
            if values.random.random() < 0.05:
                path = values.random.choice(
                    [
                        "/api/metrics/",
                        f"/api/metrics/{runs[0]}/",
                        "/api/runs/",
                        f"/api/runs/{runs[0]}/logs/",
                        f"/api/runs/{quote(str(values.text()), errors='replace')[:500]}/",
                    ]
                )
                answer = (
                    client.get(f"{path}?{values.query()}")
                    if path != "/api/metrics/"
                    else client.get("/api/pods/")
                )
                assert answer.status_code < 500 and (answer.is_success or refused_well(answer)), (
                    path,
                    answer.text[:500],
                )
        check_rows(client, folder, stored)
    return statuses


def check_rows(client: Any, folder: Path, stored: int) -> None:
    """Check that every row is in the answers, and that every page of a run with metrics is
    complete."""
    with contextlib.closing(sqlite3.connect(folder / "master.db")) as database:
        rows = dict(database.execute("SELECT owner, count(*) FROM metrics GROUP BY owner"))
        runs = dict(database.execute("SELECT id, name FROM runs"))
    # A form or a single metric with a known id may have been delivered twice.
    assert sum(rows.values()) <= stored
    everything = client.get("/api/metrics/").json()
    shown = {f"pod:{name}": metrics for name, metrics in everything["pod_metrics"].items()}
    shown |= {f"run:{id}": everything["run_metrics"][name] for id, name in runs.items()}
    counts = {owner: sum(map(len, metrics.values())) for owner, metrics in shown.items()}
    assert {owner: count for owner, count in counts.items() if count} == rows
    assert {run["id"] for run in client.get("/api/runs/").json()} == set(runs)
    for owner in rows:
        kind, _, name = owner.partition(":")
        for query in ("", "&summarize=3", "&last_n=2", "&since=1970-01-01"):
            assert client.get(f"/api/metrics/{name}/?metric_type={kind}{query}").status_code == 200
        content = client.get(f"/api/metrics/{name}/?metric_type={kind}&format=zip").content
        assert zipfile.ZipFile(BytesIO(content)).testzip() is None
        if kind == "run":
            assert client.get(f"/runs/{name}/").status_code == 200
    assert client.get("/").status_code == 200


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """A master on a port, in a thread of this process; its URL."""
    import uvicorn

    from mlbench_master.connection_limits import Connection

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        app = create_app(data_dir=folder, engine=IdleEngine(), token=TOKEN)
        server = uvicorn.Server(
            uvicorn.Config(app, http=Connection, ws="none", log_level="error", log_config=None)
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield url
        finally:
            server.should_exit = True
            thread.join()


def schemathesis(program: str, folder: Path, cases: int, seed: int, phases: str) -> str:
    """Run schemathesis against a master; the end of its report.

    Raises:
        AssertionError: It found a failure, or a row that was stored cannot be read.
    """
    with serving(folder) as url:
        # The number is for each operation, of which 13 have many inputs to vary; the stream of
        # events has no end.
        options = [
            "--max-examples",
            str(max(1, cases // 13)),
            "--seed",
            str(seed),
            "--checks",
            CHECKS,
        ]
        options += ["--exclude-path", "/api/events/", "--header", f"Authorization: Bearer {TOKEN}"]
        options += [
            "--phases",
            phases,
            "--continue-on-failure",
            "--no-color",
            "--request-timeout",
            "60",
        ]
        options += ["--suppress-health-check", "all"]
        done = subprocess.run(
            [program, "run", f"{url}/openapi.json", *options],
            capture_output=True,
            text=True,
            cwd=folder,
        )
    report = done.stdout + done.stderr
    assert done.returncode == 0, report[-6000:]
    with TestClient(
        create_app(data_dir=folder, engine=IdleEngine(), token=TOKEN),
        base_url="http://127.0.0.1:5080",
        headers={"Authorization": f"Bearer {TOKEN}"},
        raise_server_exceptions=False,
    ) as client:
        check_rows(client, folder, sys.maxsize)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--schemathesis", metavar="PROGRAM", help="Run this program instead of the fuzzer above."
    )
    arguments = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.schemathesis:
            report = schemathesis(
                arguments.schemathesis,
                Path(folder),
                arguments.cases,
                arguments.seed,
                "examples,coverage,fuzzing",
            )
            print(re.sub(r"\n{2,}", "\n", report)[-2500:])
        else:
            statuses = fuzz(Path(folder), arguments.cases, arguments.seed)
            print(", ".join(f"{status}: {count}" for status, count in sorted(statuses.items())))
    print(f"{time.monotonic() - start:.0f} s, no failure")


if __name__ == "__main__":
    main()
