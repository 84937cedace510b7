"""Clusters: created, listed, chosen and deleted, with programs that only record their calls."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import fastjsonschema
import pytest
import yaml

from mlbench_cli._clusters import cloud as cloud_clusters
from mlbench_cli._clusters import kind as kind_clusters
from mlbench_cli.commands import clusters
from mlbench_core.client.clusters import (
    Cluster,
    current_cluster,
    forget_cluster,
    read_clusters,
    remember_cluster,
)
from mlbench_core.client.masters import find_credentials
from mlbench_core.paths import user_folder
from tests.cli.conftest import Call
from tests.cli.fake_master import FakeMaster
from tests.cli.fake_programs import FakePrograms
from tests.cli.test_completion import complete

KIND = ("create-cluster", "kind", "2", "my")
AWS = ("create-cluster", "aws", "2", "my", "--package", "mlbench-core==4")


@pytest.fixture
def programs(tmp_path: Path, patch: pytest.MonkeyPatch) -> FakePrograms:
    return FakePrograms(tmp_path / "programs", patch)


@pytest.fixture
def chart(tmp_path: Path) -> tuple[str, str]:
    folder = tmp_path / "chart"
    folder.mkdir()
    return "--chart-location", str(folder)


@pytest.fixture
def master(fake: FakeMaster, patch: pytest.MonkeyPatch) -> FakeMaster:
    """The master of the next cluster: the port of the cluster is the one at which this master
    listens."""
    patch.delenv("MLBENCH_MASTER_URL")
    patch.setattr(clusters, "FIRST_PORT", int(fake.url.rpartition(":")[2]))
    patch.setattr(clusters, "_is_free", lambda port: True)
    patch.setattr(kind_clusters, "ANSWER_S", 0.0)
    return fake


def test_kind_from_create_to_delete(
    programs: FakePrograms, master: FakeMaster, call: Call, chart: tuple[str, str]
) -> None:
    programs.answer("docker-images", "mlbench/master:1\nother/x:1\nmlbench/task1a:<none>\n")
    result = call(
        *KIND, *chart, "-v", "persistence.size=1Gi", "--load-image", "me/own:1", "-k", "1.33.1"
    )
    assert (
        f"created my-2; 'mlbench run' uses it now, and its dashboard is at {master.url}\n"
        in result.stdout
    )
    assert "no image mlbench/master" not in result.stderr
    made = programs.calls()
    assert [line for line in made if line.split()[1] not in ("info", "images", "get")] == [
        "kind create cluster --name my-2 --config - --wait 300s --image kindest/node:v1.33.1",
        "kind load docker-image mlbench/master:1 me/own:1 --name my-2",
        "kubectl --context kind-my-2 apply --filename -",
        f"helm upgrade --install mlbench {chart[1]} --kube-context kind-my-2 "
        "--namespace mlbench --values - --set persistence.size=1Gi",
        (
            "kubectl --context kind-my-2 --namespace mlbench rollout status "
            "deployment/mlbench-master --timeout 300s"
        ),
    ]
    nodes = yaml.safe_load(programs.stdin("kind-create"))["nodes"]
    assert [node["role"] for node in nodes] == ["control-plane", "worker", "worker"]
    (port,) = nodes[0]["extraPortMappings"]
    assert (port["listenAddress"], f"http://127.0.0.1:{port['hostPort']}") == (
        "127.0.0.1",
        master.url,
    )
    values = yaml.safe_load(programs.stdin("helm-upgrade"))
    assert values["limits"] == {"workers": 2, "cpu": None, "gpu": 0}
    assert values["master"]["service"] == {"type": "NodePort", "nodePort": port["containerPort"]}

    namespace, secret = json.loads(programs.stdin("kubectl---context"))["items"]
    assert (namespace["kind"], secret["kind"]) == ("Namespace", "Secret")
    assert namespace["metadata"]["name"] == secret["metadata"]["namespace"] == "mlbench"
    assert secret["metadata"]["name"] == values["master"]["token"]["existingSecret"]
    token = secret["stringData"]["token"]
    assert len(token) == 64
    assert token not in call(*KIND, *chart, "--dry-run").output
    assert not any(token in text for text in (*made, result.stdout, result.stderr))
    assert user_folder("clusters.json").stat().st_mode & 0o777 == 0o600
    master.token = token
    assert call("get-dashboard-url").stdout == f"{master.url}\n"
    call("status")
    assert call("set-cluster", "--none").stdout == "in use: the master of this machine\n"
    assert "no master is running" in call("status", code=1).stderr
    assert call("set-cluster", "kind", "my-2").stdout == f"in use: my-2 ({master.url})\n"

    assert "nothing deleted" in call("delete-cluster", "kind", "my-2", input="n\n").stderr
    assert read_clusters()
    # As in version 3.0, a script is not asked.
    assert call("delete-cluster", "kind", "my-2").stdout == "deleted my-2\n"
    assert programs.calls()[-1] == "kind delete cluster --name my-2"
    assert (read_clusters(), current_cluster()) == ({}, None)


def test_the_chart_takes_the_values(programs: FakePrograms, call: Call) -> None:
    steps = json.loads(call(*KIND, "-c", "3", "--dry-run", "--json").stdout)["steps"]
    (helm,) = (step for step in steps if step["command"][0] == "helm")
    chart = Path(helm["command"][4])
    schema = fastjsonschema.compile(json.loads((chart / "values.schema.json").read_text()))
    values = yaml.safe_load((chart / "values.yaml").read_text())
    for name, value in json.loads(helm["stdin"]).items():
        for key, own in value.items():
            assert key in values[name]
            values[name][key] = {**values[name][key], **own} if isinstance(own, dict) else own
    schema(values)
    values["limits"]["workers"] = "many"
    with pytest.raises(fastjsonschema.JsonSchemaException):
        schema(values)


def test_kind_that_failed_half_way_says_what_is_left_and_goes_on(
    programs: FakePrograms,
    master: FakeMaster,
    call: Call,
    chart: tuple[str, str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    programs.fail("helm-upgrade", "no such value")
    error = call(*KIND, *chart, code=1).stderr.splitlines()[-1]
    assert error.startswith("mlbench: could not install MLBench in the cluster: 'helm upgrade ")
    assert "The cluster my-2 is left" in error
    assert "remove it with 'mlbench delete-cluster kind my-2'" in error
    assert "no such value" in capfd.readouterr().err
    assert current_cluster() is None
    programs.calls()
    token = read_clusters()["my-2"].token

    programs.fail("helm-upgrade", None)
    remarks = call(*KIND, *chart).stderr
    assert "exists, so only what is missing is done" in remarks
    assert "no image mlbench/master was found in Docker" in remarks
    assert not any(line.startswith("kind create") for line in programs.calls())
    assert (
        json.loads(programs.stdin("kubectl---context"))["items"][1]["stringData"]["token"] == token
    )


def test_kind_that_created_nothing_is_forgotten(
    programs: FakePrograms, call: Call, chart: tuple[str, str]
) -> None:
    programs.fail("kind-create")
    assert "Nothing is left of the cluster" in call(*KIND, *chart, code=1).stderr
    assert read_clusters() == {}


def test_a_master_that_does_not_answer_fails(
    programs: FakePrograms, call: Call, chart: tuple[str, str], patch: pytest.MonkeyPatch
) -> None:
    patch.setattr(kind_clusters, "ANSWER_S", 0.0)
    error = call(*KIND, *chart, code=1).stderr
    assert "the master does not answer at http://127.0.0.1:" in error
    assert "The cluster my-2 is left" in error


def test_a_master_that_refuses_the_token_fails(
    programs: FakePrograms, master: FakeMaster, call: Call, chart: tuple[str, str]
) -> None:
    master.token = "another"
    assert "the master does not answer at" in call(*KIND, *chart, code=1).stderr


def test_ctrl_c_says_what_is_left(
    programs: FakePrograms, call: Call, chart: tuple[str, str], patch: pytest.MonkeyPatch
) -> None:
    programs.answer("kind-get", "")

    def interrupt(step: object) -> None:
        programs.answer("kind-get", "my-2\n")
        raise KeyboardInterrupt

    patch.setattr(kind_clusters, "perform", interrupt)
    assert "remove it with 'mlbench delete-cluster kind my-2'" in call(*KIND, *chart, code=1).stderr


def test_missing_programs_are_named_with_their_source(
    programs: FakePrograms, call: Call, chart: tuple[str, str]
) -> None:
    programs.fail("docker-info", "Cannot connect to the Docker daemon")
    error = call(*KIND, *chart, code=1).stderr
    assert (
        "kind needs a container engine that runs, but 'docker "
        "info' failed: Cannot connect to the Docker"
    ) in error
    programs.remove("kind", "helm", "docker", "sky")
    error = call(*KIND, *chart, code=1).stderr
    assert (
        "not found: kind (https://kind.sigs.k8s.io); helm "
        "(https://helm.sh/docs/intro/install); docker ("
    ) in error
    assert "kubectl (" not in error
    assert "sky (pipx install 'skypilot[gcp,aws,azure]')" in call(*AWS, code=1).stderr
    assert read_clusters() == {}


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("kind", "2", "my", "-g", "1"), 2, "--num-gpus must be 0: a cluster of kind has no GPUs"),
        (
            ("kind", "2", "my", "-k", "1.15"),
            1,
            "--kubernetes-version must be a full version such as 1.33.1, not 1.15",
        ),
        (
            ("kind", "2", "My"),
            2,
            "'My' must have lowercase letters, digits and hyphens, begin with a letter",
        ),
        (("kind", "2", "1my"), 2, "'1my' must have lowercase letters"),
        # The host name my...-2-control-plane would have 64 characters.
        (("kind", "2", "m" * 48), 2, "have at most 47 characters"),
        (("kind", "0", "my"), 2, "0 is not in the range"),
        (
            ("gcloud", "2", "my", "-p", "x"),
            2,
            "--project must not be given: SkyPilot uses the project of",
        ),
        (("aws", "2", "my"), 1, "the package index does not have the development version"),
        (("aws", "2", "my", "--package", "x.whl"), 1, "x.whl does not exist: give --package a"),
        (("aws", "2", "my", "--package", "x\nrun: y"), 1, "--package must be one line"),
    ],
)
def test_create_used_wrongly(
    arguments: tuple[str, ...],
    code: int,
    told: str,
    programs: FakePrograms,
    call: Call,
    chart: tuple[str, str],
) -> None:
    own = chart if arguments[0] == "kind" else ()
    assert told in call("create-cluster", *arguments, *own, code=code).stderr
    assert not any(line.split()[1] in ("create", "launch") for line in programs.calls())
    assert read_clusters() == {}


def test_h_is_the_port_of_the_registry_as_in_version_3_0(call: Call) -> None:
    # Help would end with 0 although nothing was created.
    assert (
        "Option '-h' requires an argument"
        in call("create-cluster", "kind", "3", "c", "-h", code=2).stderr
    )
    assert (
        "--host_port has no effect"
        in call("create-cluster", "kind", "3", "c", "-h", "5001", "--dry-run").stderr
    )


def test_a_cluster_of_somebody_else_is_left_alone(
    programs: FakePrograms, call: Call, chart: tuple[str, str]
) -> None:
    programs.answer("kind-get", "my-2\n")
    told = call(*KIND, *chart, code=1).stderr
    assert "cluster my-2 already exists and was not created by mlbench" in told
    assert read_clusters() == {}
    remember_cluster(Cluster("my-2", "kind", 2, 15080))
    assert "cluster my-2 already exists at kind: choose another" in call(*AWS, code=1).stderr


def test_dry_run_of_kind_creates_nothing(
    programs: FakePrograms, call: Call, chart: tuple[str, str]
) -> None:
    programs.remove("docker", "kind", "helm", "kubectl")
    text = call(*KIND, *chart, "--dry-run").stdout
    assert "kind create cluster --name my-2 --config - --wait 300s <<'END'\nkind: Cluster\n" in text
    assert '"token": "<a random token>"' in text
    plan = json.loads(call(*KIND, *chart, "--dry-run", "--json").stdout)
    assert [step["command"][0] for step in plan["steps"]] == ["kind", "kubectl", "helm", "kubectl"]
    assert (programs.calls(), read_clusters()) == ([], {})


def test_options_of_3_0_without_a_meaning_are_answered(
    programs: FakePrograms, call: Call, chart: tuple[str, str]
) -> None:
    old = ("-r", "kind-registry", "-p", "5000", "-h", "5000")
    answered = call(*KIND, *chart, "--dry-run", *old).stderr
    for option in ("--registry_name", "--registry_port", "--host_port"):
        assert (
            f"{option} has no effect: the images of this machine are loaded without a registry"
            in answered
        )
    answered = call(
        *AWS, "--dry-run", "-k", "1.15", "-v", "a=b", "-cl", "x", "--ssh-key", "me"
    ).stderr
    for option in ("--kubernetes-version", "--custom-value", "--chart-location", "--ssh-key"):
        assert f"{option} has no effect: " in answered


def resources(call: Call, *arguments: str) -> dict[str, Any]:
    """The machines in SkyPilot's file for a call of create-cluster."""
    plan = json.loads(call("create-cluster", *arguments, "--dry-run", "--json").stdout)
    found: dict[str, Any] = yaml.safe_load(plan["task"])["resources"]
    return found


AUTOSTOP = {"idle_minutes": 5, "down": True, "wait_for": "jobs"}
PLAIN = {"cpus": "4+", "disk_size": 50, "use_spot": False, "autostop": AUTOSTOP}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("gcloud", "2", "my"), {"infra": "gcp", **PLAIN}),
        (
            (
                "gcloud",
                "2",
                "my",
                "-z",
                "europe-west1-b",
                "-e",
                "-d",
                "9",
                "-c",
                "8",
                "-g",
                "2",
                "--gpu-type",
                "K80",
            ),
            {
                **PLAIN,
                "infra": "gcp/*/europe-west1-b",
                "use_spot": True,
                "disk_size": 9,
                "cpus": "8+",
            }
            | {"accelerators": {"K80": 2}},
        ),
        (
            (
                "gcloud",
                "1",
                "my",
                "-g",
                "1",
                "--gpu-type",
                "nvidia-tesla-v100",
                "--region",
                "r",
                "--zone",
                "z",
            ),
            {"infra": "gcp/r/z", **PLAIN, "accelerators": {"V100": 1}},
        ),
        (
            (
                "aws",
                "1",
                "my",
                "-t",
                "m6i.large",
                "--region",
                "us-east-1",
                "-a",
                "ami-1",
                "--autostop",
                "0",
            ),
            {
                "infra": "aws/us-east-1",
                "instance_type": "m6i.large",
                "disk_size": 50,
                "use_spot": False,
            }
            | {"image_id": "ami-1"},
        ),
        (("azure", "1", "my", "--spot"), {"infra": "azure", **PLAIN, "use_spot": True}),
    ],
)
def test_machines_of_a_cloud(
    arguments: tuple[str, ...], expected: dict[str, Any], programs: FakePrograms, call: Call
) -> None:
    assert resources(call, *arguments) == expected


def test_skypilot_accepts_the_file(programs: FakePrograms, call: Call, tmp_path: Path) -> None:
    sky = pytest.importorskip("sky", reason="needs the extra [cloud]")
    wheel = tmp_path / "mlbench_core-4-py3-none-any.whl"
    wheel.touch()
    call(
        "create-cluster",
        "gcloud",
        "2",
        "my",
        "--dry-run",
        "--package",
        str(wheel),
        "-z",
        "z",
        "-g",
        "1",
        "-e",
    )
    task = sky.Task.from_yaml(str(user_folder("clusters", "my-2.yaml")))
    (found,) = task.resources
    assert (task.num_nodes, found.use_spot, found.accelerators, found.zone) == (
        2,
        True,
        {"T4": 1},
        "z",
    )
    assert (found.autostop_config.idle_minutes, found.autostop_config.down) == (5, True)


def test_the_first_machine_runs_the_master_until_it_is_idle(
    programs: FakePrograms, call: Call, tmp_path: Path
) -> None:
    wheel = tmp_path / "mlbench_core-4-py3-none-any.whl"
    wheel.touch()
    command = (
        "create-cluster",
        "aws",
        "3",
        "my",
        "--dry-run",
        "--json",
        "--package",
        str(wheel),
        "-g",
        "4",
    )
    task = yaml.safe_load(json.loads(call(*command, "--autostop", "30").stdout)["task"])
    assert task["num_nodes"] == 3
    assert task["file_mounts"] == {f"~/{wheel.name}": str(wheel)}
    assert f"pip install ~/{wheel.name}'[master,vision]'\n" in task["setup"]
    assert "mlbench master --engine hosts --port 15080 --end-when-idle 1800\n" in task["run"]
    assert "slots=4" in task["run"]
    assert "--end-when-idle" not in json.loads(call(*command, "--autostop", "0").stdout)["task"]


def test_a_cloud_from_create_to_delete(
    programs: FakePrograms, master: FakeMaster, call: Call
) -> None:
    master.token = "secret-of-the-master"
    programs.answer(
        "ssh-cat", {"url": "x", "pid": 1, "started": "x", "token": master.token, "key": master.key}
    )
    result = call(*AWS, input="n\n", code=1)
    assert (
        "The cloud charges this price until the cluster is "
        "deleted, which happens about 65 minutes after"
    ) in result.stderr
    path = user_folder("clusters", "my-2.yaml")
    assert programs.calls() == [f"sky launch --dryrun --yes --cluster my-2 {path}"]
    assert read_clusters() == {}

    result = call(*AWS, "--yes", "--json")
    assert json.loads(result.stdout) == {
        "name": "my-2",
        "provider": "aws",
        "num_workers": 2,
        "url": master.url,
    }
    made = programs.calls()
    assert made[1] == f"sky launch --yes --detach-run --cluster my-2 {path}"
    assert made[2].endswith(" my-2 cat mlbench/master.json")
    assert len(made) == 3, "the tunnel is open"
    assert master.token not in "".join((*made, result.output, path.read_text()))
    assert tuple(find_credentials(master.url)) == (master.token, master.key)
    call("status")
    # Another program at the port cannot prove that it is the master.
    master.key = "another"
    assert "is not the master that this user started" in call("status", code=1).stderr

    assert call("delete-cluster", "aws", "my-2", "-y", "-z", "x").stdout == "deleted my-2\n"
    assert programs.calls()[-1] == "sky down --yes my-2"
    assert read_clusters() == {}


def test_a_cloud_without_a_price_rents_nothing(programs: FakePrograms, call: Call) -> None:
    programs.fail("sky-dryrun", "Cloud access is not set up")
    assert "could not show the machines and the price" in call(*AWS, "--yes", code=1).stderr
    assert len(programs.calls()) == 1
    assert call(*AWS, "--dry-run", code=1).stdout.startswith(
        f"# {user_folder('clusters', 'my-2.yaml')}\nname: my-2\n"
    )


@pytest.mark.parametrize("key", ["sky-launch", "ssh-cat", "ssh--f"])
def test_a_cloud_that_failed_half_way_says_that_machines_cost_money(
    key: str, programs: FakePrograms, call: Call, patch: pytest.MonkeyPatch
) -> None:
    patch.setattr(cloud_clusters, "ANSWER_S", 0.0)
    programs.answer("ssh-cat", {"token": "t", "key": "k"})
    programs.fail(key, "no route")
    error = call(*AWS, "--yes", code=1).stderr.splitlines()[-1]
    assert "Machines may be left, and they cost money" in error
    assert "'mlbench delete-cluster aws my-2' deletes them" in error
    assert "no route" in error or key == "sky-launch"
    assert list(read_clusters()) == ["my-2"]
    assert current_cluster() is None


@pytest.mark.parametrize(
    "answer",
    ["", "[]", '{"token": "t"}', '{"token": "a b", "key": "k"}', '{"token": "t", "key": 2}'],
)
def test_a_record_from_the_cloud_that_is_damaged(
    answer: str, programs: FakePrograms, call: Call, patch: pytest.MonkeyPatch
) -> None:
    programs.answer("ssh-cat", answer)
    assert (
        "the first machine of my-2 has no valid record of a master"
        in call(*AWS, "--yes", code=1).stderr
    )


def test_the_tunnel_is_opened_again_by_the_next_command(
    programs: FakePrograms, call: Call, patch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        remember_cluster(Cluster("my-2", "aws", 2, port, "t", "k"))
        programs.answer("ssh-cat", {"token": "new", "key": "k"})
        call("set-cluster", "my-2")
        assert read_clusters()["my-2"].token == "new"
        programs.calls()
        call("status", code=1)
        (line,) = programs.calls()
        assert line.endswith(f"-o ServerAliveInterval=15 -L 127.0.0.1:{port}:127.0.0.1:{port} my-2")
        assert "ExitOnForwardFailure=yes" in line
        programs.fail("ssh--f", "Connection refused")
        error = call("status", code=1).stderr
    assert error.startswith(
        "mlbench: no tunnel to the cluster my-2: Connection refused; see its state with"
    )


def test_list_asks_each_program_once(programs: FakePrograms, call: Call) -> None:
    assert call("list-clusters").stdout == "CLUSTER  PROVIDER  STATE  MASTER\n"
    assert programs.calls() == []
    for index, (name, provider) in enumerate(
        [("a-1", "kind"), ("b-1", "kind"), ("c-1", "aws"), ("d-1", "azure")]
    ):
        remember_cluster(Cluster(name, provider, 1, 15080 + index, "secret", "secret"))
    call("set-cluster", "kind", "a-1")
    programs.answer("kind-get", "a-1\n")
    programs.answer(
        "sky-status", '\x1b[2mRefreshing\x1b[0m\n[{"name": "c-1", "status": "UP"}]\nEnd'
    )
    rows = json.loads(call("list-clusters", "--json").stdout)
    assert [(row["name"], row["state"], row["current"]) for row in rows] == [
        ("a-1", "exists", True),
        ("b-1", "gone", False),
        ("c-1", "up", False),
        ("d-1", "gone", False),
    ]
    assert "secret" not in json.dumps(rows)
    assert programs.calls() == ["kind get clusters", "sky status --refresh --output json"]
    programs.answer("sky-status", "nonsense")
    programs.remove("kind")
    result = call("list-clusters")
    assert "a-1 *    kind      unknown  http://127.0.0.1:15080\n" in result.stdout
    assert "'sky status' gave an unknown answer" in result.stderr
    assert "kind: No such file or directory" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        ((), 2, "give the NAME of a cluster, or --none"),
        (("my-2", "--none"), 2, "give the NAME of a cluster, or --none"),
        (("a", "b"), 2, "give NAME, or one of kind, gcloud, aws, azure and NAME"),
        (("aws", "my-2"), 1, "cluster 'aws my-2' does not exist; clusters: kind my-2"),
        (("other",), 1, "cluster 'other' does not exist; clusters: kind my-2"),
    ],
)
def test_set_used_wrongly(arguments: tuple[str, ...], code: int, told: str, call: Call) -> None:
    remember_cluster(Cluster("my-2", "kind", 2, 15080))
    assert told in call("set-cluster", *arguments, code=code).stderr
    assert current_cluster() is None


def test_each_cluster_has_a_port_of_its_own(
    programs: FakePrograms, call: Call, patch: pytest.MonkeyPatch
) -> None:
    patch.setattr(clusters, "_is_free", lambda port: port != clusters.FIRST_PORT + 1)
    remember_cluster(Cluster("a-1", "kind", 1, clusters.FIRST_PORT))
    plan = json.loads(call(*AWS, "--dry-run", "--json").stdout)
    assert plan["cluster"]["url"] == f"http://127.0.0.1:{clusters.FIRST_PORT + 2}"


def test_a_new_cluster_with_the_name_of_a_forgotten_one_is_not_in_use(call: Call) -> None:
    cluster = Cluster("a-1", "kind", 1, 15080)
    remember_cluster(cluster)
    call("set-cluster", "a-1")
    assert current_cluster() == cluster
    forget_cluster("a-1")
    remember_cluster(cluster)
    assert current_cluster() is None


def test_the_environment_overrules_the_chosen_cluster(fake: FakeMaster, call: Call) -> None:
    remember_cluster(Cluster("my-2", "kind", 2, 15080))
    assert "MLBENCH_MASTER_URL is set" in call("set-cluster", "my-2").stderr
    assert call("get-dashboard-url").stdout == f"{fake.url}\n"


def test_names_of_clusters_are_completed() -> None:
    for name, provider in (("a-1", "kind"), ("a-2", "aws")):
        remember_cluster(Cluster(name, provider, 1, 15080))
    assert complete("mlbench set-cluster a") == ["a-1", "a-2", "aws", "azure"]
    assert complete("mlbench delete-cluster aws a") == ["a-2"]
    assert complete("mlbench create-cluster a") == ["aws", "azure"]


def test_an_engine_that_the_cluster_lacks(master: FakeMaster, call: Call) -> None:
    remember_cluster(Cluster("my-2", "kind", 2, int(master.url.rpartition(":")[2])))
    call("set-cluster", "my-2")
    error = call("run", "x", "1", "--task", "1a", "--engine", "slurm", code=1).stderr
    assert (
        "not slurm: use the master of this machine with 'mlbench set-cluster --none', or name one"
        in error
    )


def test_damaged_records_are_left_out() -> None:
    path = user_folder("clusters.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    good = {
        "name": "a-1",
        "provider": "kind",
        "num_workers": 1,
        "port": 15080,
        "token": "t",
        "key": None,
    }
    entries = {"a-1": good, "b-1": good, "c-1": 3, "d-1": {**good, "name": "d-1", "port": "x"}}
    path.write_text(json.dumps({"current": 4, "clusters": entries}))
    assert list(read_clusters()) == ["a-1"]
    assert current_cluster() is None
    path.write_text('{"clusters": []}')
    remember_cluster(Cluster("e-1", "kind", 1, 15081))
    assert list(read_clusters()) == ["e-1"]
