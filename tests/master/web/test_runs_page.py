"""The list of the runs: filter, sort, pages and goals, without a browser."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlbench_master import create_app
from mlbench_master.database.store import NewMetric, Run, Store, run_owner
from mlbench_master.dates import now_us
from tests.master.helpers import IdleEngine, TestClient

ATTACK = "<script>alert(1)</script>"


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    app = create_app(data_dir=tmp_path, engine=IdleEngine())
    # Without "with": no scheduler runs, so the states stay as a test has made them.
    yield TestClient(app, base_url="http://127.0.0.1:5080")
    app.state.store.close()


def add(store: Store, name: str, **values: Any) -> Run:
    default: dict[str, Any] = {
        "num_workers": 1, "num_cpus": 1.0, "max_bandwidth": 1000.0, "image": "custom_image",
        "backend": "gloo",
        "command": "sleep 1", "state": "finished", "created_at": now_us(),
    }  # fmt: skip
    return store.add_run(Run(**{"name": name, **default, **values}))


def names(page: str) -> list[str]:
    return re.findall(r'<a id="run-\d+" href="/runs/\d+/">(.*?)</a>', page)


def get(client: TestClient, query: str = "") -> str:
    answer = client.get(f"/runs/{query}")
    assert answer.status_code == 200, answer.text
    return answer.text


def test_the_list_can_be_filtered_and_sorted_by_each_column(client: Any) -> None:
    store = client.app.state.store
    second = 1_000_000
    goal = {"metric": "val_global_Prec@1", "threshold": 80.0, "minimize": False, "reached": True}
    add(store, "b-run", state="failed", num_workers=4, backend="mpi", created_at=3 * second)
    add(store, "a-run", num_workers=2, created_at=1 * second, started_at=second,
    finished_at=9 * second,
        goal=json.dumps({**goal, "time_to_goal_s": 12.5}))  # fmt: skip
    add(store, "c_run", image="task0_allreduce", command="main.py --plot", created_at=2 * second,
    started_at=second,
        finished_at=3 * second, goal=json.dumps({**goal, "time_to_goal_s": 5e-3}))  # fmt: skip
    for query, found in (
        ("", ["b-run", "c_run", "a-run"]),
        ("?sort=name", ["a-run", "b-run", "c_run"]),
        ("?sort=-name", ["c_run", "b-run", "a-run"]),
        ("?sort=state", ["b-run", "a-run", "c_run"]),
        ("?sort=-num_workers", ["b-run", "a-run", "c_run"]),
        ("?sort=backend", ["a-run", "c_run", "b-run"]),
        ("?sort=-image", ["c_run", "a-run", "b-run"]),
        ("?sort=created_at", ["a-run", "c_run", "b-run"]),
        # Runs without a value come last, in both directions.
        ("?sort=duration", ["c_run", "a-run", "b-run"]),
        ("?sort=-duration", ["a-run", "c_run", "b-run"]),
        ("?sort=goal", ["c_run", "a-run", "b-run"]),
        ("?sort=-goal", ["a-run", "c_run", "b-run"]),
        ("?state=failed", ["b-run"]),
        ("?q=A-RUN", ["a-run"]),
        ("?q=plot", ["c_run"]),
        ("?q=mpi+run", ["b-run"]),
        # No character stands for others.
        ("?q=c_run", ["c_run"]),
        ("?q=a_run", []),
        ("?q=%25", []),
        ("?q=run&state=finished&sort=name", ["a-run", "c_run"]),
        # Unknown values count as left out.
        ("?sort=job_metadata&state=lost&page=x", ["b-run", "c_run", "a-run"]),
        ("?sort=--name&page=-1&q=%00", ["b-run", "c_run", "a-run"]),
    ):
        assert names(get(client, query)) == found, query


def test_a_head_of_a_column_keeps_the_filter_and_turns_the_order(client: Any) -> None:
    add(client.app.state.store, "run")
    page = get(client, "?q=run&page=1")
    assert (
        '<th scope="col" aria-sort="descending"><a id="sort-created_at" '
        'href="/runs/?q=run&amp;sort=created_at">'
    ) in page
    assert '<a id="sort-name" href="/runs/?q=run&amp;sort=name">' in page
    page = get(client, "?sort=name")
    assert '<a id="sort-name" href="/runs/?sort=-name">' in page
    assert '<option value="name" selected>' in page


def test_a_page_has_50_runs(client: Any) -> None:
    store = client.app.state.store
    for number in range(101):
        add(store, f"run-{number}", created_at=number)
    page = get(client)
    assert names(page) == [f"run-{number}" for number in range(100, 50, -1)]
    assert "1 to 50 of 101" in page and 'id="page-previous"' not in page
    page = get(client, "?page=2&sort=created_at")
    assert names(page) == [f"run-{number}" for number in range(50, 100)]
    assert '<a id="page-next" href="/runs/?sort=created_at&amp;page=3" rel="next">' in page
    # The last page, also if it has become shorter.
    for number in (3, 4, 9_999_999_999):
        assert names(get(client, f"?page={number}")) == ["run-0"]


def test_texts_of_users_are_text(client: Any) -> None:
    add(
        client.app.state.store,
        "run",
        command=f"echo '{ATTACK}'",
        backend=ATTACK,
        image=ATTACK,
        goal_result=ATTACK,
    )
    for query in ("", f"?q={ATTACK}"):
        page = get(client, query)
        assert names(page) == ["run"] and ATTACK not in page and "&lt;script&gt;alert(1)" in page


def test_runs_are_found_by_any_field_of_their_configuration(client: Any) -> None:
    store = client.app.state.store
    task = {"image": "task1a_resnet20_cifar10"}
    add(store, "slow", **task, command="main.py --lr 0.1 --optimizer power_sgd --dataset digits",
        job_metadata='{"network": "100mbit,21ms"}')  # fmt: skip
    add(store, "plain", **task, command="main.py --lr 0.2", num_workers=4)
    add(store, "own", command="train.py network=none --lr 0.1", backend="mpi")
    for query, found in (
        ("network=100MBIT,21ms", ["slow"]),
        ("lr=0.1", ["own", "slow"]),
        ("lr=0.1 backend=mpi", ["own"]),
        ("lr=0.1 power", ["slow"]),
        ("workers=4", ["plain"]),
        # The optimizer of the task without --optimizer.
        ("method=centralized_sgd", ["plain"]),
        ('goal="Prec@1 >= 95"', ["slow"]),
        # An empty value finds the runs without one.
        ("network=", ["own", "plain"]),
        # A command may hold the same text.
        ("network=none", ["own"]),
        ("lr=0.1 nothing=1", []),
        ('goal="Prec', []),
    ):
        assert names(get(client, f"?{httpx.QueryParams(q=query)}")) == found, query
    page = get(client)
    assert '<th scope="col">Method</th><th scope="col">Network</th>' in page
    assert '<td class="field" title="100mbit,21ms">100mbit,21ms</td>' in page
    assert '<option value="network=100mbit,21ms">' in page
    # Of a script that is measured unchanged, the list has the script and its method.
    add(store, "seen", command="python -m mlbench_core.observe --method ddp /x/train.py --lr 3")
    page = get(client, "?q=method=ddp")
    assert re.findall(r'class="program".*?>(.*?)</td>', page) == ["/x/train.py --lr 3"]
    # A column without a value in the list is left out.
    page = get(client, "?q=lr=0.1+backend=mpi")
    assert ">Network</th>" not in page and ">Method</th>" not in page


def groups(page: str) -> list[list[str]]:
    """The texts of the cells of each row of the table of groups, without the date."""
    table = page.partition('<table id="groups">')[2].partition("</table>")[0]
    texts = []
    for row in re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)[1:]:
        cells = re.findall(r"<t[dh].*?>(.*?)</t[dh]>", row, re.DOTALL)
        texts.append([" ".join(re.sub(r"<.*?>", "", cell).split()) for cell in cells[:-1]])
    return texts


def test_runs_with_one_value_of_a_field_are_one_row(client: Any) -> None:
    store = client.app.state.store
    aim = {"metric": "val_global_Prec@1", "threshold": 80.0, "minimize": False}

    def trained(name: str, seconds: float | None, tags: list[str], **values: Any) -> Run:
        goal = {**aim, "reached": seconds is not None, "time_to_goal_s": seconds}
        metadata = json.dumps({"tags": tags, "network": values.pop("network", "")})
        return add(store, name, goal=json.dumps(goal), job_metadata=metadata, **values)

    # It failed before its workers could send a goal, which must not make the group look better.
    add(store, "a-0", created_at=5, state="failed", job_metadata='{"tags": ["a"]}')
    trained("a-4", 20.0, ["a"], created_at=7)
    trained("a-1", 30.0, ["a"], created_at=10)
    trained("a-2", 10.0, ["a"], created_at=20, network="lan-1g")
    trained("a-3", None, ["a", "b & <i>"], created_at=30)
    trained("b-1", None, ["b & <i>"], created_at=40, state="failed")
    trained("c-1", 5.0, ["c"], created_at=50)
    trained("c-2", 7.0, ["c"], created_at=60, command="sleep 2", image="task5a_gpt")
    add(store, "lonely", created_at=70, state="started")
    page = get(client, "?group=tag")
    assert groups(page) == [
        ["c", "2 runs", "2 finished", "different goals"],
        ["b &amp; &lt;i&gt;", "2 runs", "1 failed 1 finished", "0 of 2 reached it"],
        # A run that missed is slower than each that reached it.
        ["a", "5 runs", "4 finished 1 failed", "best 10.0 s, median 30.0 s; 3 of 5 reached it"],
        ["without tag", "1 run", "1 started", ""],
    ]
    assert names(page) == [] and "1 to 4 of 4" in page
    # The rows lead to their runs, and to the comparison of these.
    for link, found in zip(
        re.findall(r'id="group-runs-\d+" href="(.*?)"', page),
        (["c-2", "c-1"], ["b-1", "a-3"], ["a-3", "a-2", "a-1", "a-4", "a-0"], ["lonely"]),
        strict=True,
    ):
        assert names(client.get(html.unescape(link)).text) == found
    link = re.findall(r'id="group-\d+" href="(.*?)"', page)[2]
    compared = client.get(html.unescape(link)).text
    found = re.findall(r'<tr data-run="\d+" data-name="(.*?)"', compared)
    assert found == ["a-3", "a-2", "a-1", "a-4", "a-0"]
    assert (
        "Compare: tag=a" in compared and '<input type="hidden" name="q" value="tag=a">' in compared
    )
    # By any field, of the runs that a search finds.
    page = get(client, "?group=network&q=tag=a")
    assert [row[:2] for row in groups(page)] == [["lan-1g", "1 run"], ["without network", "4 runs"]]
    assert groups(get(client, "?group=nothing"))[0][:2] == ["without nothing", "9 runs"]
    # Text that cannot name a field counts as left out.
    assert names(get(client, "?group=%3Ci%3E&sort=name"))[0] == "a-0"


def test_the_goal_shows_how_close_a_run_is(client: Any) -> None:
    store = client.app.state.store
    task = {
        "image": "task1a_resnet20_cifar10",
        "command": "main.py --dataset digits --light",
        "state": "started",
    }
    close = add(store, "close", **task, started_at=1)
    add(store, "fresh", **task)
    text = add(store, "text", **task)
    zero = add(store, "zero", **task)
    recorded = {
        "metric": "val_global_Perplexity",
        "threshold": 70,
        "minimize": True,
        "reached": False,
    }
    missed = add(store, "missed", goal=json.dumps(recorded))
    reached = {**recorded, "reached": True, "time_to_goal_s": 61.25}
    add(store, "reached", goal=json.dumps(reached), goal_result="old text")
    add(store, "old", goal_result="reached after a while")
    timed = add(store, "timed", **{**task, "command": "main.py --goal-after 60"})
    own = add(store, "own", state="started")
    plan = json.dumps({"metric": "val_loss", "threshold": 0.5, "minimize": True, "max_epochs": 9})
    for run, name, values in (
        (close, "val_global_Prec@1 @ 0", ("10", "45.123456")),
        (missed, "val_global_Perplexity @ 0", ("140.0",)),
        (text, "val_global_Prec@1 @ 0", (ATTACK,)),
        (zero, "val_global_Prec@1 @ 0", ("0.0",)),
        (timed, "val_global_Prec@1 @ 0", ("45.0",)),
        (own, "plan @ 0", ("{", plan)),
        (own, "val_loss @ 0", ("2.0",)),
    ):
        store.add_metrics(
            [NewMetric(run_owner(run.id), name, date, value) for date, value in enumerate(values)]
        )
    rows = dict(
        zip(
            names(page := get(client)),
            re.findall(r'<td class="goal">\s*(.*?)\s*</td>', page, re.DOTALL),
            strict=True,
        )
    )
    assert rows["close"].startswith(
        '<span title="45.123456">45.12</span> <span class="faint">of Prec@1 &gt;= 90</span>'
    )
    assert '<progress max="1" value="0.5014"' in rows["close"]
    assert (
        rows["missed"].startswith("not reached: ")
        and '<progress max="1" value="0.5"' in rows["missed"]
    )
    assert (
        rows["own"].startswith(
            '<span title="2.0">2</span> <span class="faint">of val_loss &lt;= 0.5</span>'
        )
        and 'value="0.25"' in rows["own"]
    )
    assert (
        rows["timed"]
        .split("\n")[0]
        .endswith('>45</span> <span class="faint">Prec@1 after 60 s of training</span>')
    )
    assert rows["fresh"] == '<span class="faint">Prec@1 &gt;= 90</span>'
    assert rows["text"].startswith("&lt;script&gt;") and "progress" not in rows["text"]
    assert '<progress max="1" value="0.0"' in rows["zero"]
    assert rows["reached"] == '<span title="Perplexity &lt;= 70">reached in 61.2 s</span>'
    assert ">reached after a while</span>" in rows["old"]
    assert 'Task 1a <span class="faint">digits</span>' in page


def test_a_damaged_record_does_not_hide_the_others(client: Any) -> None:
    store = client.app.state.store
    add(store, "good")
    broken = add(store, "broken")
    with store._database_engine.begin() as connection:
        for column in (
            "command",
            "image",
            "backend",
            "num_cpus",
            "num_workers",
            "started_at",
            "finished_at",
            "goal",
        ):
            connection.exec_driver_sql(f"UPDATE runs SET {column} = x'ff' WHERE id = {broken.id}")
    assert sorted(names(get(client))) == ["broken", "good"]
    assert client.get(f"/runs/new/?from={broken.id}").status_code == 200


def test_an_empty_list_says_what_to_do_next(client: Any) -> None:
    page = get(client)
    assert (
        '<a href="/runs/new/">Start the first one with the form</a>' in page
        and "mlbench run my-run 2" in page
    )
    add(client.app.state.store, "run")
    assert 'No run matches. <a href="/runs/">Show all runs</a>' in get(client, "?q=other")


def test_a_list_asks_the_database_a_fixed_number_of_times(client: Any) -> None:
    import sqlalchemy as sa

    store = client.app.state.store
    statements: list[str] = []
    sa.event.listen(
        store._database_engine, "before_cursor_execute", lambda *given: statements.append(given[2])
    )
    counts = []
    for number in range(3):
        add(store, f"run-{number}", image="task1a_resnet20_cifar10")
        statements.clear()
        get(client)
        counts.append(len(statements))
    assert counts == [3, 3, 3]


def test_a_run_that_its_user_stopped_is_not_called_failed(client: Any) -> None:
    store = client.app.state.store
    reasons = {
        "by-me": "stopped by a user; 3 metrics are missing",
        "broken": "worker 0 failed: exit status 1: E: bad",
    }
    for name, reason in reasons.items():
        add(store, name, state="failed", job_metadata=json.dumps({"stdout": [], "reason": reason}))
    states = dict(
        re.findall(
            r'href="/runs/\d+/">(.*?)</a>.*?<span class="state state-\w+">(\w+)<', get(client), re.S
        )
    )
    assert states == {"by-me": "stopped", "broken": "failed"}
    assert names(get(client, "?state=stopped")) == ["by-me"]
    assert names(get(client, "?state=failed")) == ["broken"]
    # Clients of version 3.0 wait for one of their own states.
    shown = {run["name"]: (run["state"], run["stopped"]) for run in client.get("/api/runs/").json()}
    assert shown == {"by-me": ("failed", True), "broken": ("failed", False)}
    assert len(client.get("/api/runs/?state=failed").json()) == 2
    (run_id,) = (run["id"] for run in client.get("/api/runs/").json() if run["stopped"])
    page = client.get(f"/runs/{run_id}/").text
    assert "Failed:" not in page
    assert "state-failed" not in page
    assert "Stopped by a user" in page
    for other in ("/", f"/compare/?run={run_id}", "/workers/by-me-worker-0/"):
        shown_states = re.findall(r'class="state state-(\w+)"', client.get(other).text)
        assert {"stopped", "Stopped"} & set(shown_states), other
