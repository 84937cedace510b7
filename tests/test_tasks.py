"""The tasks as data."""

from __future__ import annotations

import ast

import pytest

from mlbench_core.tasks import TASKS, Task, find_image, get_task


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.key)
def test_every_task_has_its_script_readme_and_goals(task: Task) -> None:
    assert task.script.is_file()
    assert (task.script.parent / "README.md").is_file()
    assert len(task.script.read_text().splitlines()) <= 210
    if task.goal is None or task.light_goal is None:
        assert not task.has_goal
        return
    better = min if task.minimize else max
    assert better(task.goal, task.light_goal) == task.goal


@pytest.mark.parametrize(
    "task", [task for task in TASKS.values() if task.has_goal], ids=lambda task: task.key
)
def test_train_shows_only_what_is_particular_to_the_task(task: Task) -> None:
    text = task.script.read_text()
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    (train,) = (node for node in functions if node.name == "train")
    assert [argument.arg for argument in train.args.args] == ["run"]
    lines = text.splitlines()[train.lineno - 1 : train.end_lineno]
    # Comments are welcome.
    assert len([line for line in lines if not line.lstrip().startswith("#")]) <= 48


def test_task_1a_is_as_specified() -> None:
    task = get_task("1a")
    assert (task.goal, task.light_goal, task.metric, task.max_epochs) == (80.0, 70.0, "Prec@1", 164)
    assert task.goal_on(None) == task.goal_on("cifar10") == 80.0
    assert task.goal_on("digits", light=False) == 95.0


def test_task_2a_is_as_specified() -> None:
    task = get_task("2a")
    assert (task.goal, task.light_goal, task.metric, task.max_epochs) == (89.0, 80.0, "Prec@1", 164)
    assert (task.dataset, task.goal_loss) == ("epsilon", 0.2828)
    assert set(task.stand_ins) == {
        "a9a", "agaricus", "australian", "heart_scale", "rcv1", "webspam", "synthetic_dense"
    }  # fmt: skip


def test_task_5a_has_the_metric_and_the_goal_of_its_preset() -> None:
    task = get_task("5a")
    assert task.datasets == ("fineweb10b", "wikitext2")
    for arguments, metric, preset in (
        ([], "loss", "gpt2"),
        (["--preset", "gpt2"], "loss", "gpt2"),
        (["--dataset", "wikitext2"], "BitsPerByte", "mini"),
        (["--preset", "mini"], "BitsPerByte", "mini"),
        (["--dataset=wikitext2", "--preset=tiny"], "BitsPerByte", "tiny"),
    ):
        assert task.metric_of(arguments) == metric
        assert task.goal_of(arguments) == task.goal_on(task.dataset_of(preset), preset=preset)
    assert task.goal_of([]) == 3.28
    assert len({task.goal_on(None, preset=preset) for preset in ("gpt2", "mini", "tiny")}) == 3


def test_task_0_measures_and_has_no_goal() -> None:
    task = get_task("task0")
    assert (task.folder, task.backends) == ("task0_allreduce", ("gloo", "nccl", "mpi"))
    assert (task.has_goal, task.metric, task.goal, task.light_goal, task.max_epochs) == (
        False,
        None,
        None,
        None,
        None,
    )
    with pytest.raises(ValueError, match="task 0 has no goal: it only measures"):
        task.goal_on(None, light=True)


def test_half_a_goal_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"of task 9 must be all given or all None, not None, 3\.0, .*give none if"
    ):
        Task(key="9", folder="f", title="t", model="m", data="d", goal=3.0)


@pytest.mark.parametrize("name", ["1a", "task1a", "TASK1A", "task1a_resnet20_cifar10"])
def test_names_of_a_task(name: str) -> None:
    assert get_task(name).key == "1a"


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"task must be one of 0, 1a, .*, not 'nine'"):
        get_task("nine")
    with pytest.raises(ValueError, match=r"one of cifar10, digits, mnist for task 1a, not 'faces'"):
        get_task("1a").goal_on("faces")


def test_command_has_the_placeholders_of_the_engines() -> None:
    command = get_task("1a").command("--dataset", "digits")
    assert command.endswith("--run_id {run_id} --backend {backend} --dataset digits")


@pytest.mark.parametrize(
    ("image", "key", "arguments"),
    [
        ("mlbench/pytorch-backend-benchmark:latest", "0", ()),
        ("PyTorch Communication Backends", "0", ()),
        ("mlbench/pytorch-cifar10-resnet20-all-reduce:latest", "1a", ()),
        ("mlbench/pytorch-cifar10-resnet20-ddp:latest", "1a", ("--optimizer", "ddp")),
        ("docker.io/mlbench/pytorch-cifar10-resnet20-ddp", "1a", ("--optimizer", "ddp")),
        ("pytorch cifar-10 resnet-20 (ddp)", "1a", ("--optimizer", "ddp")),
        ("mlbench/pytorch-epsilon-logistic-regression-all-reduce:latest", "2a", ()),
        ("PyTorch Linear Logistic Regression", "2a", ()),
        ("mlbench/pytorch-wikitext2-lstm-all-reduce:latest", "3a", ()),
        ("mlbench/pytorch-wmt16-gnmt-all-reduce:latest", "4a", ()),
        ("mlbench/pytorch-wmt17-transformer-all-reduce:latest", "4b", ()),
        ("PyTorch Distributed Backend benchmarking", "0", ()),
        ("PyTorch Language Modeling (AWD-LSTM)", "3a", ()),
        ("PyTorch Machine Translation GNMT", "4a", ()),
        ("PyTorch Machine Translation Transformer (Scaling LR)", "4b", ()),
        ("Tensorflow Cifar-10 ResNet-20 Open-MPI", "1a", ()),
        ("mlbench/tensorflow-cifar10-resnet:latest", "1a", ()),
        ("PyTorch Cifar-10 ResNet-20 (Scaling LR)", "1a", ()),
        ("PyTorch Cifar-10 ResNet-20 Open-MPI (SCaling LR)", "1a", ()),
        ("PyTorch Cifar-10 ResNet-20 (DDP) (Scaling LR)", "1a", ("--optimizer", "ddp")),
        ("mlbench/pytorch-cifar10-resnet-scaling:latest", "1a", ()),
    ],
)
def test_images_of_3_0_and_their_tasks(image: str, key: str, arguments: tuple[str, ...]) -> None:
    task, found = find_image(image)
    assert (task.key, found.arguments) == (key, arguments)


def test_no_two_images_share_a_name() -> None:
    images = [image for task in TASKS.values() for image in task.images]
    names = [
        name.lower() for image in images for name in (image.title, image.name, *image.other_names)
    ]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "image", ["me/pytorch-cifar10-resnet20-ddp:latest", "mlbench/tensorflow-cifar10", ""]
)
def test_other_images_are_not_a_task(image: str) -> None:
    with pytest.raises(
        ValueError,
        match=r"image must be one of mlbench/pytorch-backend-benchmark:latest, .*give a task",
    ):
        find_image(image)
