"""Modules of version 3.0 outside the list of public names keep their import path, or the
documentation says so."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import pytest

import mlbench_core

KEPT = {
    "dataset.nlp.pytorch.wmt16.utils": ["build_collate_fn"],
    "dataset.nlp.pytorch.wmt17.collate": ["collate_batch"],
    "dataset.nlp.pytorch.wmt17.preprocess": [],
    "dataset.nlp.pytorch.wmt17.preprocess.sub_tokenizer": ["Subtokenizer"],
    "models.pytorch.gnmt.attention": ["BahdanauAttention"],
    "models.pytorch.gnmt.decoder": ["ResidualRecurrentDecoder"],
    "models.pytorch.gnmt.encoder": ["ResidualRecurrentEncoder"],
    "models.pytorch.transformer.decoder": ["TransformerDecoder"],
    "models.pytorch.transformer.encoder": ["TransformerEncoder"],
    "models.pytorch.transformer.modules.embeddings": [
        "LearnedPositionalEmbedding",
        "SinusoidalPositionalEmbedding",
    ],
}
GONE = [
    "cli.aws_utils",
    "cli.chartbuilder",
    "cli.gcloud_utils",
    "cli.kind_utils",
    "cli.utils",
    "dataset.nlp.pytorch.wmt17.preprocess.indexed_dataset",
    "dataset.nlp.pytorch.wmt17.preprocess.preprocess",
    "models.pytorch.gnmt.utils",
]
UPGRADING = Path(__file__).parents[2] / "docs/howto/upgrading.md"


@pytest.mark.parametrize("name", KEPT)
def test_a_module_keeps_its_path_and_its_classes(name: str) -> None:
    module = importlib.import_module(f"mlbench_core.{name}")
    assert [found for found in KEPT[name] if not callable(getattr(module, found, None))] == []


def test_the_module_of_tensorflow_keeps_its_path() -> None:
    # TensorFlow may not be installed, so the module is not imported.
    folder = Path(mlbench_core.__file__).parent / "dataset/imagerecognition/tensorflow"
    assert (folder / "cifar10.py").is_file()


@pytest.mark.parametrize("name", GONE)
def test_a_module_that_is_gone_is_documented(name: str) -> None:
    assert importlib.util.find_spec(f"mlbench_core.{name}") is None
    text = UPGRADING.read_text(encoding="utf-8")
    gone = text.partition("These modules of version 3.0 are gone")[2].partition("## ")[0]
    assert f".{name.rpartition('.')[2]}`" in gone
