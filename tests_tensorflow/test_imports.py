"""The import paths and names of version 3.0, and what an import loads."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mlbench_core

NAMES = """
mlbench_core.controlflow.tensorflow
  TrainValidation(train_op, sess, loss, metrics, max_train_steps, train_set_init_op,
    validation_set_init_op, run_id,
    rank, lr_scheduler_level="epoch", tracker=None)
  TrainValidation.train_one_epoch(self, lr_tensor_name=None)
  TrainValidation.valid_one_epoch(self)
  TrainValidation.train_and_eval(self, initial_epoch=0, lr_tensor_name=None)
  train_round(session, train_set_init_op, train_op, loss_op, metrics, batch_size,
    num_batches_per_epoch, tracker,
    lr_tensor=None, lr_scheduler_level=None)
  validation_round(session, validation_set_init_op, loss_op, metrics, batch_size,
    num_batches_per_epoch, tracker)
mlbench_core.dataset.imagerecognition.tensorflow
  DatasetCifar(dataset, dataset_root, batch_size, world_size, rank, seed, tf_dtype=float32)
  DatasetCifar.input_fn(self, is_train, repeat_count=-1, num_shards=1, shard_index=0)
mlbench_core.evaluation.tensorflow.criterion
  softmax_cross_entropy_with_logits_v2_l2_regularized(logits, labels, l2, loss_filter_fn)
mlbench_core.evaluation.tensorflow.metrics
  TopKAccuracy(logits, labels, topk=1)
  topk_accuracy_with_logits(logits, labels, k=1)
mlbench_core.lr_scheduler.tensorflow.lr
  manual_stepping(global_step, boundaries, rates, warmup=False)
mlbench_core.models.tensorflow.resnet_model
  Cifar10Model(resnet_size, data_format=None, num_classes=10, resnet_version=2, dtype=float32)
  Model(resnet_size, bottleneck, num_classes, num_filters, kernel_size, conv_stride,
    first_pool_size, first_pool_stride,
    block_sizes, block_strides, resnet_version=2, data_format=None, dtype=float32)
  fixed_padding(inputs, kernel_size, data_format)
  conv2d_fixed_padding(inputs, filters, kernel_size, strides, data_format)
  batch_norm(inputs, training, data_format)
  block_layer(inputs, filters, bottleneck, block_fn, blocks, strides, training, name, data_format)
mlbench_core.utils.tensorflow
  default_session_config(tf_allow_growth, tf_log_device_placement, tf_allow_soft_placement)
""".replace(",\n    ", ", ")


def read_names() -> list[tuple[str, str]]:
    module, found = "", []
    for line in NAMES.strip().splitlines():
        if line.startswith(" "):
            found.append((module, line.strip()))
        else:
            module = line
    return found


@pytest.mark.parametrize(("module", "call"), read_names())
def test_name_is_there_and_takes_its_arguments(module: str, call: str) -> None:
    name, _, arguments = call.partition("(")
    found: object = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    expected = ast.parse(f"def f({arguments}: pass").body[0].args  # type: ignore[attr-defined]
    parameters = list(inspect.signature(found).parameters.values())  # type: ignore[arg-type]
    assert [p.name for p in parameters] == [argument.arg for argument in expected.args]
    defaults = [p.default for p in parameters if p.default is not p.empty]
    assert [getattr(default, "name", default) for default in defaults] == [
        default.id if isinstance(default, ast.Name) else ast.literal_eval(default)
        for default in expected.defaults
    ]


def test_properties_of_version_3() -> None:
    from mlbench_core.dataset.imagerecognition.tensorflow import DatasetCifar

    for name in ("train_init_op", "validation_init_op", "inputs", "labels", "training"):
        assert isinstance(getattr(DatasetCifar, name), property)


def test_no_module_for_tensorflow_loads_torch() -> None:
    found = pkgutil.walk_packages(mlbench_core.__path__, "mlbench_core.", onerror=lambda name: None)
    names = [name for _, name, _ in found if ".tensorflow" in name]
    assert len(names) > 10
    code = (
        f"import importlib, sys\nfor name in {names}: importlib.import_module(name)\nassert "
        "'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_packages_load_their_modules_on_first_use() -> None:
    code = (
        "import mlbench_core; assert mlbench_core.models.tensorflow.resnet_model.Cifar10Model; "
        "assert mlbench_core.evaluation.tensorflow.metrics and "
        "mlbench_core.evaluation.tensorflow.criterion; "
        "assert mlbench_core.lr_scheduler.tensorflow.lr and mlbench_core.utils.tensorflow; "
        "assert mlbench_core.distributed.tensorflow.mirrored and "
        "mlbench_core.distributed.tensorflow.settings"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def modules_with_examples() -> list[str]:
    root = Path(mlbench_core.__file__).parent
    paths = [
        path
        for path in sorted(root.rglob("*.py"))
        if "tensorflow" in path.parts and ">>> " in path.read_text()
    ]
    return [
        ".".join(["mlbench_core", *path.relative_to(root).with_suffix("").parts]) for path in paths
    ]


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_the_script_of_the_page_prints_what_the_page_shows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (Path(mlbench_core.__file__).parents[1] / "docs" / "howto" / "tensorflow.md").read_text(
        encoding="utf-8"
    )
    ((code, shown),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", page, re.DOTALL)
    exec(compile(code, "tensorflow.md", "exec"), {"__name__": "page"})
    assert capsys.readouterr().out == shown
