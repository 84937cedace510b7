"""The start form without a browser: its runs, its errors, and what it shows of an engine."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlbench_core.network.named_networks import NETWORKS
from mlbench_core.tasks import TASKS, get_task
from mlbench_master import create_app
from tests.helpers.processes import ROOT
from tests.master.helpers import IdleEngine, TestClient

ATTACK = "<script>alert(1)</script>"
TASK = {
    "name": "demo",
    "num_workers": "2",
    "kind": "task",
    "task": "1a",
    "num_cpus": "1",
    "backend": "gloo",
}
COMMAND = {**TASK, "kind": "command", "command": "python train.py --seed {seed}"}


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    app = create_app(data_dir=tmp_path, engine=IdleEngine())
    # Without "with": no scheduler runs, so no run starts.
    yield TestClient(app, base_url="http://127.0.0.1:5080", follow_redirects=False)
    app.state.store.close()


class EngineWithOptions(IdleEngine):
    """An engine whose own command has options."""

    options_example = "--time=<10>"

    def check_options(self, options: Sequence[str]) -> None:
        if "--bad" in options:
            raise ValueError("engine_options: must not have --bad: leave it out")


def runs(client: Any) -> list[dict[str, Any]]:
    return list(client.get("/api/runs/").json())


def errors(page: str) -> dict[str, str]:
    return {
        name: html.unescape(text) for name, text in re.findall(r'id="error-(\w+)">(.*?)</p>', page)
    }


def test_a_task_is_started_once_for_each_number_of_workers(client: Any) -> None:
    form = {**TASK, "num_workers": "1 2, 4 2", "dataset": "digits", "optimizer": "ef_sign_sgd",
    "num_cpus": "0.5",
            "arguments": "--data 'a b'", "light_target": "true"}  # fmt: skip
    answer = client.post("/runs/", data=form)
    assert (answer.status_code, answer.headers["location"]) == (303, "/runs/")
    made = runs(client)
    assert [(run["name"], run["num_workers"], run["num_cpus"]) for run in made] == [
        ("demo-1", 1, 0.5), ("demo-2", 2, 0.5), ("demo-4", 4, 0.5)
    ]  # fmt: skip
    for run in made:
        assert run["command"].endswith(
            "--dataset digits --optimizer ef_sign_sgd --data 'a b' --light"
        )
        assert (run["state"], run["image"], run["light_target"]) == (
            "initialized",
            get_task("1a").folder,
            True,
        )


def test_one_run_leads_to_its_page(client: Any) -> None:
    answer = client.post("/runs/", data=TASK)
    (run,) = runs(client)
    assert (answer.status_code, answer.headers["location"]) == (303, f"/runs/{run['id']}/")


def test_repeats_have_names_and_seeds_as_with_the_command(client: Any) -> None:
    client.post(
        "/runs/",
        data={**COMMAND, "num_workers": "1 2", "repeats": "2", "seed": "7", "exclusive": "true"},
    )
    made = runs(client)
    assert [(run["name"], run["command"][-1]) for run in made] == [
        ("demo-1-r1", "7"), ("demo-2-r1", "7"), ("demo-1-r2", "8"), ("demo-2-r2", "8")
    ]  # fmt: skip
    assert all(run["job_metadata"]["exclusive"] for run in made)


def test_only_the_fields_of_the_chosen_program_count(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A browser also sends the texts of the fields that are hidden."""
    everything = {**TASK, "command": "sleep 1", "image_name": "custom_image",
    "custom_image_name": "me/mine:1",
                  "arguments": "--channels-last", "dataset": "digits",
                  "custom_backend": "x"}  # fmt: skip
    reference = TASKS["1a"].images[1].reference
    for number, (change, command, image) in enumerate((
        ({"kind": "task"}, "--dataset digits --channels-last", get_task("1a").folder),
        ({"kind": "command"}, "sleep 1", "custom_image"),
        ({"kind": "image"}, "sleep 1", "me/mine:1"),
        ({"kind": "image", "image_name": reference}, "--optimizer ddp --channels-last", reference),
    )):  # fmt: skip
        # A command without an image is refused in containers, and an image without them.
        monkeypatch.setattr(IdleEngine, "starts_containers", change["kind"] != "command")
        answer = client.post("/runs/", data={**everything, **change, "name": f"run-{number}"})
        assert answer.status_code == 303, errors(answer.text)
        made = runs(client)[-1]
        assert made["command"].endswith(command) and (made["image"], made["backend"]) == (
            image,
            "gloo",
        )


SCRIPT = {
    **TASK,
    "kind": "script",
    # The folder of a script must exist.
    "script": f"{ROOT}/own.py --lr '1 2'",
    "method": "power_sgd:rank=4",
    "metrics": "'val_loss=val loss ([0-9.]+)' 'acc=(.)'",
    "goal": "val_loss<=0.4",
}


def test_a_script_is_started_with_its_method_metrics_and_goal(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(IdleEngine, "starts_processes", True)
    for name, change in (("full", {}), ("bare", {"method": "", "metrics": "", "goal": ""})):
        form = {**SCRIPT, **change, "name": name, "repeats": "2", "light_target": "true"}
        answer = client.post("/runs/", data=form)
        assert answer.status_code == 303, errors(answer.text)
    full, again, bare, _ = runs(client)
    script = f"{ROOT}/own.py --lr '1 2'"
    assert full["command"] == (
        "python -m mlbench_core.observe --method power_sgd:rank=4 "
        "--metric 'val_loss=val loss ([0-9.]+)' --metric 'acc=(.)' --goal 'val_loss<=0.4' "
        f"{script}"
    )
    assert again["command"] == full["command"]
    assert bare["command"] == f"python -m mlbench_core.observe {script}"
    assert (full["job_metadata"]["cwd"], full["light_target"]) == (str(ROOT), False)


def test_a_custom_backend_may_start_one_worker(client: Any) -> None:
    form = {**COMMAND, "backend": "custom_backend", "custom_backend": "mine"}
    client.post("/runs/", data={**form, "run_all_nodes": "true"})
    client.post("/runs/", data={**form, "name": "first"})
    assert [(run["backend"], run["run_all_nodes"]) for run in runs(client)] == [
        ("mine", True),
        ("mine", False),
    ]


@pytest.mark.parametrize(
    ("form", "change", "wrong"),
    [
        (TASK, {"name": "My run"}, {"name": "must be 1 to 63 lowercase letters"}),
        (TASK, {"name": ""}, {"name": "must be 1 to 63 lowercase letters"}),
        (TASK, {"name": "a" * 62}, {"name": "must be a DNS label"}),
        (
            TASK,
            {"num_workers": "1 2 x"},
            {"num_workers": "must be whole numbers from 1, not '1 2 x': give for example"},
        ),
        (
            TASK,
            {"num_workers": "5000"},
            {"num_workers": "Input should be less than or equal to 4096"},
        ),
        (
            TASK,
            {"num_workers": "1 2 3", "repeats": "200"},
            {"repeats": "must give at most 500 runs at once, not 600"},
        ),
        (
            TASK,
            {"num_workers": " ".join(map(str, range(1, 502)))},
            {"num_workers": "must give at most 500 runs"},
        ),
        (TASK, {"num_cpus": "nan"}, {"num_cpus": "Input should be a finite number"}),
        (TASK, {"kind": "other"}, {"kind": "must be task, script, image or command, not 'other'"}),
        (TASK, {"task": "9"}, {"task": "task must be one of 0, 1a"}),
        (
            TASK,
            {"dataset": "a9a"},
            {"dataset": "must be one of cifar10, digits, mnist for task 1a, not 'a9a'"},
        ),
        (TASK, {"task": "0", "dataset": "digits"}, {"dataset": "must be left out for task 0"}),
        (
            TASK,
            {"task": "2a", "optimizer": "ddp"},
            {"optimizer": "must be left out for task 2a, not 'ddp'"},
        ),
        (TASK, {"optimizer": "sgd"}, {"optimizer": "must be one of centralized_sgd, ddp"}),
        (
            TASK,
            {"dataset": "digits", "arguments": "--dataset=mnist"},
            {"arguments": "must not have --dataset, which"},
        ),
        (TASK, {"arguments": "'x"}, {"arguments": "must be quoted as for a shell"}),
        (TASK, {"arguments": "x\n" * 257}, {"arguments": "should have at most 256 items"}),
        (TASK, {"arguments": "a\x00b"}, {"arguments": "must not contain a NUL character"}),
        (TASK, {"backend": "pigeon"}, {"backend": "unknown backend 'pigeon'"}),
        (TASK, {"backend": "nccl"}, {"backend": "nccl needs GPUs"}),
        (
            TASK,
            {"backend": "custom_backend"},
            {"custom_backend": "is required with backend=custom_backend"},
        ),
        (TASK, {"repeats": "0"}, {"repeats": "must be a whole number from 1 to 1000, not '0'"}),
        (TASK, {"seed": "x"}, {"seed": "must be a whole number from 0"}),
        (
            TASK,
            {"task": "0", "repeats": "2"},
            {"repeats": "--repeats cannot be given with task 0: it only measures"},
        ),
        (TASK, {"seed": "3", "arguments": "--seed 4"}, {"seed": "--seed among the arguments"}),
        (TASK, {"max_bandwidth": "10"}, {"max_bandwidth": "must be at least 1000"}),
        (
            TASK,
            {"gpu_enabled": "true"},
            {"gpu_enabled": "must be false, not true: the engine idle found no GPU"},
        ),
        (
            TASK,
            {"kind": "image", "image_name": "no/such"},
            {"image_name": "image must be one of mlbench/"},
        ),
        (COMMAND, {"command": ""}, {"command": "must be a command line, not empty"}),
        (COMMAND, {"command": "echo 'x {seed}"}, {"command": "must be quoted as for a shell"}),
        (
            COMMAND,
            {"command": "echo", "repeats": "2"},
            {"repeats": "--repeats needs {seed} in the command"},
        ),
        (SCRIPT, {"script": ""}, {"script": "must begin with the absolute path of a script"}),
        (SCRIPT, {"script": "train.py"}, {"script": "absolute path of a script, not 'train.py'"}),
        (SCRIPT, {"script": "/a.py '"}, {"script": "must be quoted as for a shell"}),
        (SCRIPT, {"script": "/no/a.py"}, {"script": "must be a folder on the machine"}),
        (SCRIPT, {"method": "bf61"}, {"method": "--method must be"}),
        (SCRIPT, {"metrics": "'loss=('"}, {"metrics": "must have a regular expression"}),
        (SCRIPT, {"goal": "loss"}, {"goal": "--goal must be NAME"}),
        (SCRIPT, {"goal": "other<=1"}, {"goal": "must be on a metric of the script"}),
        (SCRIPT, {"seed": "3"}, {"seed": "--seed needs {seed} in the command"}),
        # All wrong fields at once.
        (
            TASK,
            {"name": "", "num_workers": "", "num_cpus": "x", "task": "9", "repeats": "x"},
            {
                "name": "must",
                "num_workers": "must",
                "num_cpus": "Input",
                "task": "task",
                "repeats": "must",
            },
        ),
    ],
)
def test_an_error_is_at_its_field_and_everything_typed_stays(
    client: Any,
    monkeypatch: pytest.MonkeyPatch,
    form: dict[str, str],
    change: dict[str, str],
    wrong: dict[str, str],
) -> None:
    monkeypatch.setattr(IdleEngine, "gpus", ())
    monkeypatch.setattr(IdleEngine, "starts_processes", True)
    monkeypatch.setattr(IdleEngine, "sees_folders", True)
    typed = {**form, **change}
    answer = client.post("/runs/", data=typed)
    assert answer.status_code == 400
    found = errors(answer.text)
    assert found.keys() == wrong.keys()
    for name, words in wrong.items():
        assert words in found[name]
        assert (
            f'<li><a href="#field-{name}">' in answer.text and f'id="field-{name}"' in answer.text
        )
    for name, value in typed.items():
        text = re.escape(html.escape(value.strip()).replace("&#x27;", "&#39;"))
        if name in ("name", "num_workers", "num_cpus", "arguments", "command", "repeats", "seed"):
            assert re.search(rf'name="{name}"[^>]* value="{text}"', answer.text)
    assert runs(client) == []


def test_engines_with_options_have_a_field_for_them(tmp_path: Path) -> None:
    app = create_app(data_dir=tmp_path, engine=EngineWithOptions())
    client = TestClient(app, base_url="http://127.0.0.1:5080", follow_redirects=False)
    assert re.search(
        r'name="engine_options"[^>]* value=""[^>]* placeholder="--time=&lt;10&gt;"',
        client.get("/runs/new/").text,
    )
    for typed, words in (
        ("--bad --time=5", "must not have --bad: leave it out"),
        ("'x", "must be quoted as for a shell"),
    ):
        answer = client.post("/runs/", data={**TASK, "engine_options": typed})
        assert answer.status_code == 400 and words in errors(answer.text)["engine_options"]
        assert re.search(
            rf'name="engine_options"[^>]* value="{html.escape(typed).replace("x27", "39")}"',
            answer.text,
        )
    assert (
        client.post(
            "/runs/", data={**TASK, "engine_options": "--time=5 '--comment=a b'"}
        ).status_code
        == 303
    )
    (run,) = runs(client)
    assert run["job_metadata"]["engine_options"] == ["--time=5", "--comment=a b"]
    again = client.get(f"/runs/new/?from={run['id']}").text
    assert re.search(
        r"""name="engine_options"[^>]* value="--time=5 &#39;--comment=a b&#39;\"""", again
    )
    app.state.store.close()


def test_options_are_refused_by_an_engine_without_options(client: Any) -> None:
    assert 'name="engine_options"' not in client.get("/runs/new/").text
    page = client.post("/runs/", data={**TASK, "engine_options": "--time=5"}).text
    assert errors(page) == {
        "engine_options": "must be left out, not '--time=5': the engine idle has none"
    }
    assert 'value="--time=5"' in page and "The engine idle has none." in page


def test_the_cores_of_an_engine_without_a_limit_are_not_named(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cores, is_named in ((4.0, True), (float("inf"), False)):
        monkeypatch.setattr(IdleEngine, "capacity", cores)
        assert ("All workers together have 4." in client.get("/runs/new/").text) == is_named
        assert " inf" not in client.get("/runs/new/").text


def test_a_name_in_use_is_found_before_the_first_run_starts(client: Any) -> None:
    client.post("/runs/", data={**TASK, "num_workers": "4"})
    answer = client.post("/runs/", data={**TASK, "num_workers": "1 2 4"})
    assert answer.status_code == 400
    assert errors(answer.text) == {
        "name": "there is a run named 'demo-4'; choose another name or delete that run"
    }
    assert [run["name"] for run in runs(client)] == ["demo-4"]


def test_texts_of_users_are_text(client: Any) -> None:
    form = dict.fromkeys(
        (*TASK, "dataset", "arguments", "command", "custom_backend", "repeats"), f'">{ATTACK}'
    )
    page = client.post("/runs/", data=form).text
    assert ATTACK not in page and "&#34;&gt;&lt;script&gt;" in page


def test_another_site_cannot_start_a_run(client: Any) -> None:
    for origin in ("http://evil.example", "null", "http://127.0.0.1:5081"):
        assert client.post("/runs/", data=TASK, headers={"Origin": origin}).status_code == 403
    assert (
        client.post(
            "/runs/", content=b"[1]", headers={"Content-Type": "application/json"}
        ).status_code
        == 400
    )
    assert runs(client) == []
    assert (
        client.post("/runs/", data=TASK, headers={"Origin": "http://127.0.0.1:5080"}).status_code
        == 303
    )


def test_the_form_shows_what_tasks_and_engine_offer(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(IdleEngine, "gpus", ())
    page = client.get("/runs/new/").text
    for task in TASKS.values():
        assert f'<option value="{task.key}"' in page
        for name in (*task.datasets[1:], *task.optimizers[1:]):
            assert f"<option>{name}</option>" in page
        for image in task.images:
            assert f'<option value="{image.reference}">' in page
    assert re.search(r'id="field-gpu_enabled"[^>]* disabled>', page)
    assert (
        "Not possible: the engine idle found no GPU" in page and 'name="max_bandwidth"' not in page
    )
    assert "the engine idle cannot limit the bandwidth" in page
    monkeypatch.setattr(IdleEngine, "gpus", ("0", "1"))
    monkeypatch.setattr(IdleEngine, "limits_bandwidth", True)
    monkeypatch.setattr(IdleEngine, "emulates_networks", True)
    page = client.get("/runs/new/").text
    assert (
        "This machine has 2." in page
        and 'name="max_bandwidth"' in page
        and "ot possible" not in page
    )


@pytest.mark.parametrize(
    ("form", "shown"),
    [
        (
            {
                **TASK,
                "dataset": "digits",
                "optimizer": "ddp",
                "arguments": "--data 'a b'",
                "light_target": "true",
            },
            {"arguments": "--data 'a b'", "num_workers": "2", "num_cpus": "1"},
        ),
        (
            {**COMMAND, "repeats": "2", "num_cpus": "0.5"},
            {"command": "python train.py --seed 42", "num_cpus": "0.5"},
        ),
        (
            {**COMMAND, "kind": "image", "image_name": "custom_image", "custom_image_name": "me/i"},
            {"custom_image_name": "me/i"},
        ),
        ({**COMMAND, "elastic": "1:4"}, {"elastic": "1:4"}),
        (SCRIPT, {name: SCRIPT[name] for name in ("script", "method", "metrics", "goal")}),
    ],
)
def test_a_run_can_be_started_again(
    client: Any, monkeypatch: pytest.MonkeyPatch, form: dict[str, str], shown: dict[str, str]
) -> None:
    without_image = ("command", "script")
    monkeypatch.setattr(IdleEngine, "starts_containers", form["kind"] not in without_image)
    monkeypatch.setattr(IdleEngine, "starts_processes", form["kind"] == "script")
    monkeypatch.setattr(IdleEngine, "replaces_workers", "elastic" in form)
    client.post("/runs/", data=form)
    first = runs(client)[0]
    (link,) = re.findall(
        r'href="(/runs/new/[^"]*)">Run again<', client.get(f"/runs/{first['id']}/").text
    )
    page = client.get(link).text
    values = dict(re.findall(r'<input id="field-\w+" name="(\w+)"[^>]* value="(.*?)"', page))
    assert html.unescape(values["name"]) == "demo-again"
    assert shown.items() <= {name: html.unescape(value) for name, value in values.items()}.items()
    chosen = {}
    assert f'value="{form["kind"]}" checked' in page
    # What the form sends starts the same run.
    for name in re.findall(r'<select id="field-(\w+)"', page):
        block = page[page.index(f'<select id="field-{name}"') :].partition("</select>")[0]
        option = re.search(r'<option(?: value="(.*?)")? selected>(.*?)<', block)
        chosen[name] = "" if option is None else option[1] if option[1] is not None else option[2]
    boxes = re.findall(r'type="checkbox" id="field-(\w+)"[^>]* checked', page)
    again = (
        {name: html.unescape(value) for name, value in values.items()}
        | chosen
        | dict.fromkeys(boxes, "true")
    )
    answer = client.post("/runs/", data={**again, "kind": form["kind"]})
    assert answer.status_code == 303, errors(answer.text)
    second = runs(client)[-1]
    assert second["name"] == "demo-again-2"
    for field in (
        "command",
        "image",
        "num_workers",
        "num_cpus",
        "backend",
        "light_target",
        "gpu_enabled",
    ):
        assert second[field] == first[field]
    assert second["job_metadata"].get("elastic") == form.get("elastic")


class Emulating(IdleEngine):
    """Emulates networks, and cannot limit a bandwidth."""

    emulates_networks = True
    limits_bandwidth = False


def test_an_engine_with_networks_shows_their_names_and_no_remark_about_a_bandwidth(
    tmp_path: Path,
) -> None:
    app = create_app(data_dir=tmp_path, engine=Emulating())
    page = TestClient(app, base_url="http://127.0.0.1:5080").get("/runs/new/").text
    app.state.store.close()
    assert "andwidth" not in page
    assert "not possible" not in page
    hint = re.search(r'id="hint-network">(.*?)</p>', page)[1]  # type: ignore[index]
    assert all(name in hint for name in NETWORKS)
