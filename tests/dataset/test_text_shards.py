"""Shards of tokens from text: their bytes, and the symbols of tokenizers that the tests train."""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlbench_core.dataset.nlp.pytorch import text_shards
from mlbench_core.dataset.nlp.pytorch.text_shards import convert_text
from mlbench_core.errors import DatasetError, MissingDependencyError
from tests.helpers.shards import shard_bytes

WORDS = ["a", "the", "dog", "runs", "Zürich", "don't", "12", ",", " ", "\t", "\n", "\n", "\n\n"]


def write_tokenizer(path: Path, special: list[str], text: str = "the dog runs " * 9) -> Any:
    """A tokenizer with the rules of GPT-2, trained on a text."""
    tokenizers: Any = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.save(str(path))
    return tokenizer


def read(folder: Path, split: str) -> list[list[int]]:
    """The tokens of each shard, read without the library."""
    found = []
    for path in sorted(folder.glob(f"text_{split}_*.bin")):
        tokens = np.fromfile(path, dtype="<u2", offset=1024).tolist()
        assert path.read_bytes() == shard_bytes(tokens)
        found.append(tokens)
    return found


@pytest.mark.parametrize("shard_tokens", [1, 3, 10, 11, 12])
@pytest.mark.parametrize("piece", [2, 100])
def test_shards_are_filled_in_order(
    tmp_path: Path, shard_tokens: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_shards, "_PIECE_BYTES", piece)
    for name, content in (("a", b"01234"), ("b", b""), ("c", b"56789x")):
        (tmp_path / name).write_bytes(content)
    texts = [tmp_path / name for name in "abc"]
    assert convert_text(texts, tmp_path, "val", shard_tokens=shard_tokens) == 11
    found = read(tmp_path, "val")
    assert list(itertools.chain(*found)) == list(b"0123456789x")
    assert {len(shard) for shard in found[:-1]} <= {shard_tokens}
    assert 0 < len(found[-1]) <= shard_tokens


@pytest.mark.parametrize("seed", range(5))
def test_the_symbols_of_a_long_text_are_those_of_the_whole(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_shards, "_PIECE_BYTES", 8)
    text = "".join(random.Random(seed).choices(WORDS, k=3000)) + "\n"
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", [], text)
    (tmp_path / "a.txt").write_text(text, encoding="utf-8", newline="")
    assert len(list(text_shards._pieces(tmp_path / "a.txt"))) > 50
    count = convert_text(
        [tmp_path / "a.txt"], tmp_path, "train", tokenizer=tmp_path / "tokenizer.json"
    )
    (found,) = read(tmp_path, "train")
    assert found == tokenizer.encode(text).ids and count == len(found)


def test_each_text_begins_with_the_symbol_of_documents(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer = write_tokenizer(path, ["<pad>", "<|endoftext|>"])
    # The settings of the file for sentences must not cut the text off.
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(path))
    for name in "ab":
        (tmp_path / name).write_text(f"the dog {name}")
    convert_text([tmp_path / "a", tmp_path / "b"], tmp_path, "train", tokenizer=path)
    ((first, *found),) = read(tmp_path, "train")
    assert first == 1 and found.count(1) == 1 and found.count(0) == 0
    tokenizer.no_truncation()
    tokenizer.no_padding()
    assert tokenizer.decode(found[: found.index(1)]) == "the dog a\n"
    assert tokenizer.decode(found[found.index(1) + 1 :]) == "the dog b\n"


def test_a_tokenizer_with_too_many_symbols_is_refused(tmp_path: Path) -> None:
    tokenizers: Any = pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    for most, fits in ((65_535, True), (65_536, False)):
        model = tokenizers.models.WordLevel({"a": 0, "z": most}, unk_token="a")
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(path))
        (tmp_path / "a.txt").write_text("z")
        if fits:
            convert_text([tmp_path / "a.txt"], tmp_path, "val", tokenizer=path)
            assert read(tmp_path, "val")[0][0] == most
            continue
        with pytest.raises(DatasetError, match="symbols from 0 to 65535, not to 65536"):
            convert_text([tmp_path / "a.txt"], tmp_path / "new", "val", tokenizer=path)


def test_wrong_files_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    text, folder = tmp_path / "a.txt", tmp_path / "shards"
    text.write_bytes(b"")
    with pytest.raises(DatasetError, match=f"{text} must have text, but is empty"):
        convert_text([text], folder, "train")
    text.write_bytes(b"good\n\xff")
    path = tmp_path / "tokenizer.json"
    write_tokenizer(path, [])
    with pytest.raises(DatasetError, match="is not UTF-8 text: line 2"):
        convert_text([text], folder, "train", tokenizer=path)
    with pytest.raises(DatasetError, match="cannot be read"):
        convert_text([text, tmp_path / "none"], folder, "train", shard_tokens=2)
    path.write_text("{}")
    with pytest.raises(DatasetError, match=r"must be a tokenizer\.json of the package"):
        convert_text([text], folder, "train", tokenizer=path)
    assert list(folder.iterdir()) == []
    with pytest.raises(ValueError, match="split must be 'train' or 'val', not 'test'"):
        convert_text([text], folder, "test")


def test_without_the_package_the_command_that_installs_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'mlbench-core\[text\]'"):
        convert_text([tmp_path / "a"], tmp_path, "train", tokenizer=tmp_path / "t.json")
