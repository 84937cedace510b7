"""WikiText-2: counts, streams, lengths, sharing among workers, the cache, and what goes wrong."""

from __future__ import annotations

import gzip
import itertools
import json
import logging
import time
import zipfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mlbench_core.dataset.nlp.pytorch import Wikitext2Dataset, corpus, wikitext2_dataset
from mlbench_core.dataset.nlp.pytorch.wikitext2_dataset import (
    WIKITEXT2_TOKENS,
    WIKITEXT2_WORDS,
    Dictionary,
)
from mlbench_core.errors import (
    DatasetError,
    DatasetNotFoundError,
    DownloadError,
    MissingDependencyError,
)
from tests.helpers.data import test_data

TEXT = {"train": "a b c\n\n a  d \n", "valid": "d a\n", "test": "b b e"}


def write_texts(folder: Path, names: str = "{part}.txt") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for part, text in TEXT.items():
        path = folder / names.format(part=part)
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return folder


def numbers(folder: Path, n: int, bptt: int, **options: object) -> Wikitext2Dataset:
    """A data set whose word number i is the word i."""
    folder.mkdir(exist_ok=True)
    (folder / "train.txt").write_text(" ".join(map(str, range(n - 1))))
    return Wikitext2Dataset(folder, bptt, train=True, download=False, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Wikitext2Dataset]:
    folder, cache = test_data("wikitext-2"), tmp_path_factory.mktemp("cache")
    return {
        "train": Wikitext2Dataset(folder, 70, train=True, cache_dir=cache),
        "valid": Wikitext2Dataset(folder, 70, valid=True, cache_dir=cache),
        "test": Wikitext2Dataset(folder, 70, test=True, cache_dir=cache),
    }


def test_real_text_has_the_published_tokens_and_words(real: dict[str, Wikitext2Dataset]) -> None:
    for part, dataset in real.items():
        assert len(dataset.tokens) == WIKITEXT2_TOKENS[part]
        assert len(dataset.dictionary) == WIKITEXT2_WORDS == 33_278
        assert dataset.dictionary == real["train"].dictionary
    assert WIKITEXT2_TOKENS == {"train": 2_088_628, "valid": 217_646, "test": 245_569}
    train = real["train"]
    assert len(np.unique(train.tokens)) == 33_278  # every word occurs in the training part
    words = [train.dictionary.idx2word[i] for i in train.tokens[:8]]
    assert words == ["<eos>", "=", "Valkyria", "Chronicles", "III", "=", "<eos>", "<eos>"]
    text = gzip.decompress(test_data("wikitext-2", "valid.txt.gz").read_bytes()).decode()
    lines = text.removesuffix("\n").split("\n")
    expected = list(itertools.chain.from_iterable([*line.split(), "<eos>"] for line in lines))
    assert [train.dictionary.idx2word[i] for i in real["valid"].tokens] == expected


def test_real_epoch_has_the_lengths_that_are_asked_for(real: dict[str, Wikitext2Dataset]) -> None:
    train = real["train"]
    train.generate_batches(global_bsz=80)
    assert train.sequence_lengths[:-1].tolist() == [70] * (train.num_batches() - 1)
    assert train.sequence_lengths.sum() == 2_088_628 // 80 - 1
    lengths: list[int] = []
    for epoch in range(30):
        train.set_epoch(epoch)
        train.generate_sequence_lengths(random=True)
        assert train.sequence_lengths.sum() == 2_088_628 // 80 - 1
        assert train.sequence_lengths.min() >= 5
        lengths += train.sequence_lengths[:-1].tolist()
    around = np.array(lengths)
    short, full = around[around < 52], around[around >= 52]
    assert len(short) / len(around) == pytest.approx(0.05, abs=0.01)
    assert short.mean() == pytest.approx(34.5, abs=0.6)  # 35, rounded down
    assert full.mean() == pytest.approx(69.5, abs=0.2)
    assert full.std() == pytest.approx(5, abs=0.2)


@pytest.mark.parametrize(
    "names", ["{part}.txt", "{part}.txt.gz", "wiki.{part}.tokens", "wikitext-2/wiki.{part}.tokens"]
)
def test_files_are_found_under_their_names(tmp_path: Path, names: str) -> None:
    (tmp_path / "wikitext-2").mkdir()
    write_texts(tmp_path, names)
    found = {part: Wikitext2Dataset(tmp_path, 2, **{part: True}) for part in TEXT}  # type: ignore[arg-type]
    assert found["train"].dictionary.idx2word == ["a", "b", "c", "<eos>", "d", "e"]
    assert found["train"].tokens.tolist() == [0, 1, 2, 3, 3, 0, 4, 3]  # an empty line is an <eos>
    assert found["valid"].tokens.tolist() == [4, 0, 3]
    assert found["test"].tokens.tolist() == [1, 1, 5, 3]  # a last line without an end too


def test_dictionary_counts_each_word_once() -> None:
    dictionary = Dictionary()
    assert [dictionary.add_word(word) for word in ("x", "y", "x")] == [0, 1, 0]
    assert (len(dictionary), "y" in dictionary, "z" in dictionary) == (2, True, False)
    assert dictionary.word2idx == {"x": 0, "y": 1}


def test_streams_run_on_from_batch_to_batch(tmp_path: Path) -> None:
    dataset = numbers(tmp_path, 32, bptt=3)
    dataset.generate_batches(global_bsz=4)
    batches = [dataset.get_batch(i) for i in range(dataset.num_batches())]
    assert dataset.sequence_lengths.tolist() == [3, 3, 1]
    assert [target.shape for _, target in batches] == [(12,), (12,), (4,)]
    data, target = (
        torch.cat([data for data, _ in batches]),
        torch.cat([target.view(-1, 4) for _, target in batches]),
    )
    assert data.dtype == target.dtype == torch.int64
    assert data.T.tolist() == [list(range(start, start + 7)) for start in (0, 8, 16, 24)]
    assert torch.equal(target, data + 1)
    assert all(batch.is_contiguous() for pair in batches for batch in pair)
    with pytest.raises(IndexError, match="i must be at least 0 and below 3"):
        dataset.get_batch(3)


@pytest.mark.parametrize(("world_size", "random"), [(2, False), (2, True), (4, True)])
def test_workers_batches_side_by_side_are_one_workers(
    tmp_path: Path, world_size: int, random: bool
) -> None:
    def epoch(rank: int, worker_bsz: int | None) -> list[tuple[torch.Tensor, torch.Tensor]]:
        dataset = numbers(tmp_path, 1000, bptt=10)
        dataset.generate_batches(8, worker_bsz, rank)
        dataset.generate_sequence_lengths(random=random)
        batches = [dataset.get_batch(i) for i in range(dataset.num_batches())]
        return [(data, target.view_as(data)) for data, target in batches]

    alone = epoch(0, None)
    workers = [epoch(rank, 8 // world_size) for rank in range(world_size)]
    assert len({len(batches) for batches in workers}) == 1
    for whole, *parts in zip(alone, *workers, strict=True):
        for position in (0, 1):
            assert torch.equal(
                whole[position], torch.cat([part[position] for part in parts], dim=1)
            )


@pytest.mark.parametrize("world_size", [1, 3, 4, 7])
def test_validation_streams_are_shared_out_once_each(tmp_path: Path, world_size: int) -> None:
    dataset, seen = numbers(tmp_path, 50, bptt=4), Counter[int]()
    for rank in range(world_size):
        dataset.generate_batches(5, rank=rank, world_size=world_size)
        for i in range(dataset.num_batches()):
            seen.update(dataset.get_batch(i)[0].flatten().tolist())
    assert seen == Counter(i for i in range(50) if i % 10 != 9)


def test_lengths_are_equal_on_all_workers_new_each_epoch_and_go_on_where_a_run_stopped(
    tmp_path: Path,
) -> None:
    state = torch.get_rng_state()
    datasets = [numbers(tmp_path, 9000, bptt=20, seed=seed) for seed in (1, 1, 2)]
    epochs: list[list[list[int]]] = []
    for rank, dataset in enumerate(datasets):
        dataset.generate_batches(4, 2, rank % 2)
        epochs.append([])
        for _ in range(3):
            dataset.generate_sequence_lengths(random=True)
            epochs[-1].append(dataset.sequence_lengths.tolist())
    assert epochs[0] == epochs[1]
    assert epochs[0] != epochs[2]
    assert epochs[0][0] != epochs[0][1]
    datasets[2].seed = 1
    datasets[2].set_epoch(2)
    datasets[2].generate_sequence_lengths(random=True)
    assert datasets[2].sequence_lengths.tolist() == epochs[0][2]
    assert torch.equal(torch.get_rng_state(), state)


def test_no_random_batch_is_shorter_than_asked_for(tmp_path: Path) -> None:
    dataset = numbers(tmp_path, 403, bptt=9, min_seq_len=8)
    dataset.generate_batches(1)
    for _ in range(50):
        dataset.generate_sequence_lengths(random=True)
        assert dataset.sequence_lengths.min() >= 8
        assert dataset.sequence_lengths.sum() == 402


def test_lengths_can_be_set_and_written_into_as_scripts_of_3_0_do(tmp_path: Path) -> None:
    dataset = numbers(tmp_path, 42, bptt=10)
    dataset.generate_batches(global_bsz=2)
    assert dataset.sequence_lengths.dtype == torch.int64
    dataset.sequence_lengths = [1, 2, 3]
    assert dataset.num_batches() == 3
    dataset.sequence_lengths = torch.zeros(4, dtype=torch.int64)
    dataset.sequence_lengths.copy_(torch.tensor([5, 6, 7, 2]))  # as a broadcast does
    starts = [dataset.get_batch(i)[0][0, 0].item() for i in range(dataset.num_batches())]
    assert starts == [0, 5, 11, 18]
    with pytest.raises(
        ValueError,
        match=r"must be integers of shape \(batches,\), not torch.float32 of shape \(2,\)",
    ):
        dataset.sequence_lengths = torch.ones(2)
    with pytest.raises(ValueError, match=r"of shape \(\)"):
        dataset.sequence_lengths = torch.tensor(3)
    dataset.sequence_lengths = torch.tensor([15, 6, 0])
    for i, message in (
        (1, "a sum of at most 20, not 6 after 15 words"),
        (2, "at least 1 .* not 0 after 21"),
    ):
        with pytest.raises(ValueError, match=message):
            dataset.get_batch(i)


def test_second_start_reads_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_texts(tmp_path / "texts")
    first = Wikitext2Dataset(folder, 2, train=True, cache_dir=tmp_path / "cache")
    monkeypatch.setattr(corpus, "read_lines", None)
    second = Wikitext2Dataset(folder, 2, train=True, cache_dir=tmp_path / "cache")
    assert isinstance(second.tokens, np.memmap)
    assert second.tokens.tolist() == first.tokens.tolist()
    assert second.dictionary == first.dictionary
    cached = sorted(path.name for path in (tmp_path / "cache").rglob("*") if path.is_file())
    assert cached == ["dictionary.json", "test.npy", "train.npy", "valid.npy"]
    with pytest.raises(ValueError, match="read-only"):
        second.tokens[0] = 1


def test_changed_text_is_read_anew(tmp_path: Path) -> None:
    folder = write_texts(tmp_path)
    Wikitext2Dataset(folder, 2, train=True)
    (folder / "train.txt").write_text("z z\n")
    assert Wikitext2Dataset(folder, 2, train=True).dictionary.idx2word[0] == "z"


@pytest.mark.parametrize(
    "damage", ["torn array", "empty array", "wrong length", "torn words", "missing part"]
)
def test_damaged_cache_is_made_anew(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_texts(tmp_path / "texts")
    Wikitext2Dataset(folder, 2, train=True, cache_dir=tmp_path / "cache")
    (cache,) = (tmp_path / "cache").iterdir()
    if damage == "torn array":
        (cache / "train.npy").write_bytes((cache / "train.npy").read_bytes()[:-3])
    elif damage == "empty array":  # as a power cut leaves what was renamed and never written
        (cache / "train.npy").write_bytes(b"")
    elif damage == "wrong length":
        np.save(cache / "train.npy", np.zeros(3, np.int32))
    elif damage == "torn words":
        (cache / "dictionary.json").write_text('{"words": ["a"')
    else:
        (cache / "test.npy").unlink()
    with caplog.at_level(logging.WARNING):
        assert Wikitext2Dataset(folder, 2, train=True, cache_dir=tmp_path / "cache").tokens[0] == 0
    assert "is damaged" in caplog.text
    assert len(json.loads((cache / "dictionary.json").read_text())["words"]) == 6
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [cache.name]


def test_does_without_a_cache_where_none_can_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    dataset = Wikitext2Dataset(write_texts(tmp_path), 2, train=True, cache_dir=tmp_path / "file")
    assert dataset.tokens.tolist() == [0, 1, 2, 3, 3, 0, 4, 3]
    assert "cannot be written" in caplog.text


def test_download_comes_from_a_living_address_and_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fake(root: Path, file_name: str, data_url: str) -> Path:
        asked.append(data_url)
        Path(root).mkdir()
        with zipfile.ZipFile(Path(root) / file_name, "w") as archive:
            for part, text in TEXT.items():
                archive.writestr(f"wikitext-2/wiki.{part}.tokens", text)
            archive.extractall(root)
        return Path(root)

    monkeypatch.setattr(wikitext2_dataset, "maybe_download_and_extract_zip", fake)
    with pytest.raises(DatasetError, match=r"is not WikiText-2: it has .*'train': 8.* instead of"):
        Wikitext2Dataset(tmp_path / "first", 2, train=True)
    assert asked == ["https://wikitext.smerity.com/wikitext-2-v1.zip"]
    with pytest.raises(DatasetNotFoundError):  # nor is it taken for the text at the next start
        Wikitext2Dataset(tmp_path / "first", 2, train=True, download=False)
    monkeypatch.setattr(wikitext2_dataset, "WIKITEXT2_TOKENS", {"train": 8, "valid": 3, "test": 4})
    monkeypatch.setattr(wikitext2_dataset, "WIKITEXT2_WORDS", 6)
    assert len(Wikitext2Dataset(tmp_path / "second", 2, valid=True).tokens) == 3


def test_workers_that_start_together_download_once_and_read_no_half_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpacked = []

    def slow(root: Path, file_name: str, data_url: str) -> None:
        folder = Path(root) / "wikitext-2"
        folder.mkdir(parents=True, exist_ok=True)
        unpacked.append(folder)
        for part in reversed(TEXT):
            with (folder / f"wiki.{part}.tokens").open("w") as file:
                time.sleep(0.05)  # the other worker looks meanwhile
                file.write(TEXT[part])

    monkeypatch.setattr(wikitext2_dataset, "maybe_download_and_extract_zip", slow)
    monkeypatch.setattr(wikitext2_dataset, "WIKITEXT2_TOKENS", {"train": 8, "valid": 3, "test": 4})
    monkeypatch.setattr(wikitext2_dataset, "WIKITEXT2_WORDS", 6)

    def start(delay_s: float) -> list[int]:
        time.sleep(delay_s)
        return Wikitext2Dataset(
            tmp_path, 2, train=True, cache_dir=tmp_path / "cache"
        ).tokens.tolist()

    with ThreadPoolExecutor(3) as workers:
        results = list(workers.map(start, (0.0, 0.02, 0.12)))
    assert results == [[0, 1, 2, 3, 3, 0, 4, 3]] * 3
    assert len(unpacked) == 1


def test_second_mirror_has_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With stand-ins for the network and for pyarrow: its table has one row for each line, empty
    ones too."""
    asked = []

    def fail(*args: object) -> None:
        raise DownloadError("could not download")

    def fake_download(url: str, dest: Path) -> Path:
        asked.append(url)
        return dest

    def fake_table(path: Path, columns: list[str]) -> dict[str, SimpleNamespace]:
        part = path.stem.replace("validation", "valid")
        return {"text": SimpleNamespace(to_pylist=lambda: TEXT[part].splitlines(keepends=True))}

    monkeypatch.setattr(wikitext2_dataset, "maybe_download_and_extract_zip", fail)
    monkeypatch.setattr(wikitext2_dataset, "progress_download", fake_download)
    monkeypatch.setattr(
        wikitext2_dataset, "require", lambda *names: SimpleNamespace(read_table=fake_table)
    )
    monkeypatch.setattr(wikitext2_dataset, "WIKITEXT2_TOKENS", {"train": 8, "valid": 3, "test": 4})
    monkeypatch.setattr(wikitext2_dataset, "WIKITEXT2_WORDS", 6)
    assert Wikitext2Dataset(tmp_path, 2, train=True).tokens.tolist() == [0, 1, 2, 3, 3, 0, 4, 3]
    assert [url.rsplit("/", 1)[1].split("-")[0] for url in asked] == ["train", "validation", "test"]
    assert asked[0].startswith("https://huggingface.co/datasets/Salesforce/wikitext/")
    texts = sorted(path.name for path in (tmp_path / "wikitext-2").iterdir())
    assert texts == [f"wiki.{part}.tokens" for part in sorted(TEXT)]
    assert "trying the Hugging Face hub" in caplog.text

    def missing(*names: str) -> None:
        raise MissingDependencyError("pip install 'mlbench-core[text]'")

    (tmp_path / "other").mkdir()
    monkeypatch.setattr(wikitext2_dataset, "require", missing)
    with pytest.raises(DownloadError, match=r"could not download; the other mirror .* pip install"):
        Wikitext2Dataset(tmp_path / "other", 2, train=True)


def test_what_goes_wrong(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts")
    with pytest.raises(ValueError, match="must be True, not none of them"):
        Wikitext2Dataset(folder, 2)
    with pytest.raises(ValueError, match="must be True, not train and test"):
        Wikitext2Dataset(folder, 2, train=True, test=True)
    with pytest.raises(ValueError, match="bptt must be at least 1, not 0"):
        Wikitext2Dataset(folder, 0, train=True)
    dataset = Wikitext2Dataset(folder, 2, train=True)
    for call in (
        dataset.num_batches,
        dataset.generate_sequence_lengths,
        lambda: dataset.get_batch(0),
    ):
        with pytest.raises(RuntimeError, match="call generate_batches"):
            call()
    for arguments, message in [
        ((0,), "global_bsz must be from 1 to 4, not 0"),
        ((5,), "global_bsz must be from 1 to 4, not 5"),
        ((4, 2, 2), "worker_bsz must be .* of rank 2 .*, not 2"),
        ((4, 0, 0), "worker_bsz must be .*, not 0"),
        ((4, 2, -1), "rank -1"),
    ]:
        with pytest.raises(ValueError, match=message):
            dataset.generate_batches(*arguments)
    with pytest.raises(ValueError, match="rank must be from 0 to 1, not 2"):
        dataset.generate_batches(4, rank=2, world_size=2)
    with pytest.raises(ValueError, match="only one of worker_bsz and world_size"):
        dataset.generate_batches(4, 2, 0, world_size=2)
    (folder / "train.txt").rename(folder / "train.bak")
    with pytest.raises(DatasetNotFoundError, match=r"no wiki.train.tokens or train.txt .*smerity"):
        Wikitext2Dataset(folder, 2, valid=True)
    with pytest.raises(DatasetNotFoundError, match=r"empty has no wiki.train.tokens"):
        Wikitext2Dataset(tmp_path / "empty", 2, train=True, download=False)
    (folder / "train.txt.gz").write_bytes(gzip.compress(b"a b c" * 1000)[:-9])
    with pytest.raises(DatasetError, match="is damaged"):
        Wikitext2Dataset(folder, 2, train=True)
    (folder / "train.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DatasetError, match="is not UTF-8"):
        Wikitext2Dataset(folder, 2, train=True)
