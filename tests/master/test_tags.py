"""Tags and notes of runs: checked, kept, shown as text, and changed by API and form."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlbench_master import create_app
from tests.master.helpers import IdleEngine, TestClient

ATTACK = "<script>alert(1)</script>"
BODY = {"name": "a", "num_workers": 1, "command": "true"}


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Any]:
    app = create_app(data_dir=tmp_path, engine=IdleEngine())
    # Without "with": no scheduler runs, so no run starts.
    yield TestClient(app, base_url="http://127.0.0.1:5080", follow_redirects=False)
    app.state.store.close()


def shown(client: Any, run_id: int = 1) -> tuple[list[str], str]:
    run = client.get(f"/api/runs/{run_id}/").json()
    return run["tags"], run["note"]


def test_one_of_the_two_is_changed_and_the_other_stays(client: Any) -> None:
    made = client.post("/api/runs/", json={**BODY, "tags": ["x", "y", "x"]}).json()
    assert (made["tags"], made["note"]) == (["x", "y"], "")
    assert "tags" not in made["job_metadata"]
    answer = client.patch("/api/runs/1/", json={"note": "first\nsecond"})
    assert (answer.status_code, answer.json()["note"]) == (200, "first\nsecond")
    assert shown(client) == (["x", "y"], "first\nsecond")
    client.patch("/api/runs/1/", json={"tags": " paper , base line "})
    assert shown(client) == (["paper", "base line"], "first\nsecond")
    # What the master keeps about the run is not lost.
    client.app.state.store.update_run(1, {"reason": "r"})
    client.patch("/api/runs/1/", json={"tags": [], "note": ""})
    assert shown(client) == ([], "")
    assert client.get("/api/runs/1/").json()["job_metadata"]["reason"] == "r"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"tags": ["x" * 65]}, "tags.0: Value should have at most 64"),
        ({"tags": ["a,b"]}, "tags.0: must not contain a comma"),
        ({"tags": ["a\u202eb"]}, "tags.0: must not contain control characters"),
        ({"tags": ["  "]}, "tags.0: must not be empty"),
        ({"tags": [str(number) for number in range(21)]}, "tags: Value should have at most 20"),
        ({"tags": 3}, "tags: Input should be a valid list"),
        ({"note": "x" * 4097}, "note: Value should have at most 4096"),
        ({"note": "a\x00"}, "note: must not contain a NUL"),
        ({"state": "finished"}, "state: is not a field"),
    ],
    ids=range(9),
)
def test_wrong_words_are_refused_and_change_nothing(
    client: Any, body: dict[str, Any], message: str
) -> None:
    client.post("/api/runs/", json={**BODY, "tags": "kept"})
    answer = client.patch("/api/runs/1/", json=body)
    assert (answer.status_code, message in answer.json()["message"]) == (400, True), answer.text
    assert shown(client) == (["kept"], "")
    assert client.patch("/api/runs/2/", json={"note": "a"}).status_code == 404


def test_the_form_of_the_page_changes_them_and_shows_them_as_text(client: Any) -> None:
    client.post("/api/runs/", json=BODY)
    form = {"tags": f"{ATTACK}, base line", "note": f"a\n{ATTACK}"}
    answer = client.post("/runs/1/", data=form)
    assert (answer.status_code, answer.headers["location"]) == (303, "/runs/1/")
    assert shown(client) == ([ATTACK, "base line"], f"a\n{ATTACK}")
    page = client.get("/runs/1/").text
    assert ATTACK not in page and ATTACK not in client.get("/runs/").text
    assert f'<p class="text">a\n{html.escape(ATTACK)}</p>' in page
    assert f'value="{html.escape(ATTACK)}, base line"' in page
    # Each tag leads to the runs that have it.
    client.post("/api/runs/", json={**BODY, "name": "b", "tags": "other"})
    links = re.findall(r'class="tag" href="(.*?)"', page)
    assert len(links) == 2
    for link in links:
        found = client.get(html.unescape(link)).text
        assert re.findall(r'id="run-(\d+)"', found) == ["1"]
    # An empty form removes them.
    client.post("/runs/1/", data={"tags": "", "note": ""})
    assert shown(client) == ([], "")


def test_pages_of_other_sites_cannot_change_them(client: Any) -> None:
    client.post("/api/runs/", json=BODY)
    foreign = {"Origin": "https://example.org"}
    assert client.post("/runs/1/", data={"note": "x"}, headers=foreign).status_code == 403
    assert client.patch("/api/runs/1/", json={"note": "x"}, headers=foreign).status_code == 403
    assert shown(client) == ([], "")
