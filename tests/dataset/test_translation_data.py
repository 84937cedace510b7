"""WMT16, WMT17 and Multi30k: from text or archives to batches, on one worker and on several."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import io
import itertools
import logging
import tarfile
import threading
from collections.abc import Iterable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from mlbench_core.dataset.local_files import read_lines
from mlbench_core.dataset.nlp.pytorch import (
    BucketBatchSampler,
    Multi30k,
    WMT16Dataset,
    WMT17Dataset,
    build_collate_fn,
    get_batches,
    pair_text,
    shard_batches,
    wmt16_dataset,
    wmt17_dataset,
)
from mlbench_core.dataset.nlp.pytorch.pair_part import find_files
from mlbench_core.dataset.nlp.pytorch.pair_text import Cleaning
from mlbench_core.dataset.registry import NEWSTEST2014, Archive
from mlbench_core.errors import DatasetError, DatasetNotFoundError, DownloadError
from tests.helpers.data import test_data

TEXT = {
    "en": [
        "A dog runs.",
        "Two cats - one old - sleep; the dog doesn't.",
        "",
        "Dogs & cats (all) run.",
        "Run!",
    ],
    "de": [
        "Ein Hund rennt.",
        "Zwei Katzen – eine alt – schlafen.",
        "Leer",
        "Hunde & Katzen (alle) rennen.",
        "Lauf!",
    ],
}


def write_text(folder: Path, name: str, text: dict[str, list[str]], suffix: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for lang, lines in text.items():
        content = "".join(f"{line}\n" for line in lines).encode()
        (folder / f"{name}.{lang}{suffix}").write_bytes(
            gzip.compress(content) if suffix else content
        )
    return folder


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The first 400 captions to train, 60 to validate, 60 to test; and a cache."""
    folder = tmp_path_factory.mktemp("multi30k")
    for name, count in (("train", 400), ("val", 60), ("test_2016_flickr", 60)):
        text = {
            lang: list(
                itertools.islice(read_lines(test_data("multi30k", f"{name}.{lang}.gz")), count)
            )
            for lang in ("en", "de")
        }
        write_text(folder, name, text, ".gz" if name == "train" else "")
    return folder, tmp_path_factory.mktemp("cache")


def test_items_are_ids_that_become_the_text_again(real: tuple[Path, Path]) -> None:
    root, cache = real
    train = Multi30k(root, train=True, vocab_size=1200, cache_dir=cache)
    test = Multi30k(root, test=True, vocab_size=1200, cache_dir=cache)
    assert (
        train.vocab_size == test.vocab_size == 1204
        and train.tokenizer.symbols == test.tokenizer.symbols
    )
    assert len(train) == 400 and len(test) == 60
    text = list(read_lines(root / "test_2016_flickr.de"))
    assert test.references() == text
    for i, (source, target) in enumerate(test):
        assert source.dtype == torch.int64 and source[0] == 2 and source[-1] == 3
        assert test.lengths[i].tolist() == [len(source) - 2, len(target) - 2]
        if 1 not in target:  # a character that the training text does not have
            assert test.tokenizer.detokenize(target) == text[i].strip()
        assert test.tokenizer.segment(text[i], lang="de") == target.tolist()
        if i == 59:
            break
    with pytest.raises(
        ValueError, match="references must be of a complete part, not of a training part"
    ):
        train.references()
    with pytest.raises(IndexError, match="index must be at least 0 and below 60"):
        test[60]


def test_both_models_see_the_same_sentences(real: tuple[Path, Path]) -> None:
    pairs = Multi30k(real[0], validation=True, vocab_size=1200, cache_dir=real[1])
    other = pairs.for_transformer()
    assert len(other) == len(pairs) and len(other.dictionary) == 3 + 1200
    assert (
        other.src_dict is other.trg_dict
        and other.dictionary.pad() == 0
        and other.dictionary.eos() == 1
    )
    for i in range(len(pairs)):
        words = other.dictionary.string(other[i]["target"], bpe_symbol="@@ ")
        text = pairs.tokenizer.detokenize(pairs[i][1])
        assert other.detokenize(words).replace("<UNK>_", "<unk>") == text
    assert other.references() == pairs.references()


def test_limits_and_order(real: tuple[Path, Path]) -> None:
    root, cache = real
    load = functools.partial(Multi30k, root, train=True, vocab_size=1200, cache_dir=cache)
    everything = load()
    limited = load(min_len=8, max_len=30, sort=True)
    kept = (everything.lengths.min(axis=1) >= 8) & (everything.lengths.max(axis=1) <= 30)
    assert 0 < len(limited) == kept.sum() < 400
    assert (np.diff(limited.lengths[:, 0]) <= 0).all()
    assert sorted(limited.indices) == np.flatnonzero(kept).tolist()
    assert load(max_size=7).indices.tolist() == list(range(7))
    assert np.array_equal(limited.for_transformer().indices, limited.indices)
    assert load(math_precision="fp16").vocab_size == 1208
    assert np.array_equal(everything.sizes, everything.lengths.max(axis=1) + 2)
    with pytest.raises(ValueError, match="min_len must be from 0 to max_len, not 9 with max_len 8"):
        load(min_len=9, max_len=8)
    with pytest.raises(ValueError, match="max_size must be at least 1, not 0"):
        load(max_size=0)
    with pytest.raises(
        ValueError, match="tokens must be one of 'subwords', 'spacy', not 'letters'"
    ):
        load(tokens="letters")
    with pytest.raises(
        ValueError, match="exactly one of train, validation, test must be True, not train and test"
    ):
        load(test=True)


def test_a_text_to_score_that_is_not_whole_is_told_of(
    real: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    root, cache = real
    for part in ("train", "test"):
        pairs = Multi30k(root, max_len=20, vocab_size=1200, cache_dir=cache, **{part: True})  # type: ignore[arg-type]
        left_out = len(pairs.part.store) - len(pairs)
        assert left_out > 0
        assert (f"{left_out} of {len(pairs.part.store)} pairs are left out" in caplog.text) is (
            part == "test"
        )


def test_whole_words_by_spacy(real: tuple[Path, Path]) -> None:
    pytest.importorskip("spacy", reason="spaCy is not installed: pip install 'mlbench-core[spacy]'")
    pairs = Multi30k(real[0], train=True, tokens="spacy", cache_dir=real[1])
    assert pairs.tokenizer.detokenize(pairs[0][0]).endswith(".")
    assert not any(symbol.endswith("@@") for symbol in pairs.tokenizer.symbols)


def test_a_second_start_reads_no_text(
    real: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, cache = real
    first = Multi30k(root, validation=True, vocab_size=1200, cache_dir=cache)
    monkeypatch.setattr(pair_text, "read_lines", lambda path: pytest.fail(f"{path} was read"))
    second = Multi30k(root, validation=True, vocab_size=1200, cache_dir=cache)
    assert torch.equal(first[3][0], second[3][0])


def test_a_damaged_store_is_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = write_text(tmp_path, "train", TEXT)
    load = functools.partial(
        Multi30k, root, train=True, vocab_size=90, cache_dir=tmp_path / "cache"
    )
    before = load()
    (before.part.store.folder / "source.npy").write_bytes(b"nothing")
    after = load()
    assert torch.equal(before[0][0], after[0][0])
    assert "is damaged" in caplog.text


def test_processes_that_start_at_once_make_one_store(tmp_path: Path) -> None:
    """Threads here; the lock is between open files, so it makes no difference."""
    root = write_text(tmp_path, "train", TEXT)
    made: list[Path] = []

    def load() -> None:
        made.append(
            Multi30k(
                root, train=True, vocab_size=90, cache_dir=tmp_path / "cache"
            ).part.store.folder
        )

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 4 and len(set(made)) == 1
    kinds = sorted(
        path.name.partition("-")[0]
        for path in (tmp_path / "cache").iterdir()
        if path.name[0] != "."
    )
    assert kinds == ["pairs", "vocabulary", "words"]


def test_changed_text_is_read_anew(tmp_path: Path) -> None:
    root = write_text(tmp_path, "train", TEXT)
    load = functools.partial(
        Multi30k, root, train=True, vocab_size=90, cache_dir=tmp_path / "cache"
    )
    assert len(load()) == 4
    write_text(root, "train", {lang: [*lines, "Mehr."] for lang, lines in TEXT.items()})
    assert len(load()) == 5


def test_text_that_is_damaged_or_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetNotFoundError, match=r"has no train\.en and train\.de"):
        Multi30k(tmp_path, train=True)
    write_text(tmp_path, "train", {"en": ["a", "b", "c"], "de": ["x", "y"]})
    with pytest.raises(
        DatasetError,
        match=r"train\.en has 3 lines and .*train\.de 2; each line must be the translation",
    ):
        Multi30k(tmp_path, train=True)
    (tmp_path / "train.de").write_bytes(b"\xff\xfe\nb\nc\n")
    with pytest.raises(DatasetError, match=r"train\.de is not UTF-8 text"):
        Multi30k(tmp_path, train=True)
    (tmp_path / "train.de").unlink()
    (tmp_path / "train.de.gz").write_bytes(gzip.compress(b"a\nb\nc\n")[:-9])
    with pytest.raises(DatasetError, match=r"train\.de\.gz is damaged"):
        Multi30k(tmp_path, train=True)


def test_a_vocabulary_must_not_have_the_dictionarys_special_symbols(tmp_path: Path) -> None:
    write_text(tmp_path, "train", {"en": ["a b"], "de": ["b a"]})
    (tmp_path / "vocab.bpe.3").write_text("<EOS>_\na\nb\n")
    with pytest.raises(DatasetError, match=r"has one of <pad>_, <EOS>_, <UNK>_; delete that line"):
        WMT17Dataset(tmp_path, train=True)


@pytest.mark.parametrize("lang", ["ende", ("en",), ("en", "de", "fr")])
def test_two_languages_are_needed(lang: Any, tmp_path: Path) -> None:
    for kind in (Multi30k, WMT16Dataset, WMT17Dataset):
        with pytest.raises(ValueError, match="must be two languages"):
            kind(tmp_path, lang=lang, train=True)


def test_cleaning_of_training_text() -> None:
    cleaning = Cleaning(max_words=10, max_ratio=3)
    for source, target, kept in (
        (1, 3, True),
        (1, 4, False),
        (0, 0, False),
        (10, 10, True),
        (11, 10, False),
    ):
        assert cleaning.keeps(["w"] * source, ["w"] * target) is kept


def test_only_line_feeds_end_lines_and_segments_are_unescaped(tmp_path: Path) -> None:
    (tmp_path / "a.en").write_bytes("one\u2028still\x0bone\rand one\ntwo".encode())
    assert list(read_lines(tmp_path / "a.en")) == ["one\u2028still\x0bone\rand one", "two"]
    (tmp_path / "a.sgm").write_text(
        '<doc>\n<p>\n<seg id="1"> a &amp; b </seg>\n<seg id="2"></seg>\n</p>', "utf-8"
    )
    assert list(read_lines(tmp_path / "a.sgm")) == ["a & b", ""]


def test_filtered_newstest2014_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_text(tmp_path, "newstest2014", {lang: ["x"] * 2737 for lang in ("en", "de")})
    with pytest.raises(
        DatasetError, match="the filtered copy of newstest2014 with 2737 lines, not the whole text"
    ):
        find_files(tmp_path, ["newstest2014"], ("en", "de"))
    write_text(tmp_path, "newstest2014", {lang: ["x"] * 10 for lang in ("en", "de")})
    assert find_files(tmp_path, ["newstest2014"], ("en", "de")) is not None
    assert "has 10 lines; newstest2014 has 3003" in caplog.text


def test_newstest2014_of_the_real_data_is_whole(caplog: pytest.LogCaptureFixture) -> None:
    files = find_files(test_data("newstest2014"), ["newstest2014"], ("en", "de"))
    assert files is not None and len(list(read_lines(files.targets[0]))) == 3003 and not caplog.text


# --- batches ---


def test_collate_pads_time_first() -> None:
    pairs = [
        (torch.tensor([2, 5, 3]), torch.tensor([2, 3])),
        (torch.tensor([2, 5, 6, 7, 3]), torch.tensor([2, 8, 3])),
    ]
    (source, source_lengths), (target, target_lengths) = build_collate_fn(sort=True, multiple=4)(
        pairs
    )
    assert source.shape == (8, 2) and target.shape == (4, 2) and source.is_contiguous()
    assert source[:, 0].tolist() == [2, 5, 6, 7, 3, 0, 0, 0] and source_lengths.tolist() == [5, 3]
    assert target[:, 1].tolist() == [2, 3, 0, 0] and target_lengths.tolist() == [3, 2]
    (source, _), _ = build_collate_fn(batch_first=True)(pairs)
    assert source.tolist() == [[2, 5, 3, 0, 0], [2, 5, 6, 7, 3]]
    (source, lengths), _ = build_collate_fn()([])  # of a worker without pairs
    assert (source.shape, lengths.shape) == ((0, 0), (0,))
    with pytest.raises(ValueError, match="multiple must be at least 1, not 0"):
        build_collate_fn(multiple=0)


def flat(lists: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(lists))


LENGTHS = np.random.default_rng(3).integers(1, 60, 103)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_bucket_batches_are_shared_among_workers(world_size: int) -> None:
    make = functools.partial(BucketBatchSampler, LENGTHS, seed=5)
    workers = [
        list(make(12 // world_size, rank=r, world_size=world_size)) for r in range(world_size)
    ]
    alone = list(make(12))
    assert {len(worker) for worker in workers} == {len(alone)} == {103 // 12}
    assert [flat(parts) for parts in zip(*workers, strict=True)] == alone
    seen = flat(alone)
    assert len(seen) == len(set(seen)) == 96
    spread = np.mean([np.ptp(LENGTHS[batch]) for batch in alone])
    assert spread < 0.5 * np.ptp(LENGTHS)  # a random batch of 12 has 0.85 of it


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("pairs", [103, 12, 5, 2, 0])
def test_validation_batches_have_every_pair_once(world_size: int, pairs: int) -> None:
    make = functools.partial(
        BucketBatchSampler, LENGTHS[:pairs], 5, shuffle=False, world_size=world_size
    )
    workers = [list(make(rank=rank)) for rank in range(world_size)]
    assert len({len(worker) for worker in workers}) == 1 and len(workers[0]) == len(make(rank=0))
    assert sorted(i for worker in workers for batch in worker for i in batch) == list(range(pairs))
    if pairs >= world_size:
        assert all(1 <= len(batch) <= 5 for worker in workers for batch in worker)


def test_bucket_batches_differ_by_epoch_and_resume() -> None:
    sampler = BucketBatchSampler(LENGTHS, 8, seed=1)
    epochs = [list(sampler), list(sampler)]
    assert epochs[0] != epochs[1]
    sampler.set_epoch(0)
    assert list(sampler) == epochs[0]
    stopped = BucketBatchSampler(LENGTHS, 8, seed=1)
    stopped.set_epoch(1)
    begun = list(itertools.islice(stopped, 3))
    state = stopped.state_dict()
    resumed = BucketBatchSampler(LENGTHS, 8, seed=1)
    resumed.load_state_dict(state)
    resumed.set_epoch(state["epoch"])
    assert state["epoch"] == 1 and begun[: state["batch"]] + list(resumed) == epochs[1]
    with pytest.raises(ValueError, match="the state was saved with seed 1, but here it is 2"):
        BucketBatchSampler(LENGTHS, 8, seed=2).load_state_dict(state)
    with pytest.raises(
        ValueError, match="at least 6 pairs, a batch of 3 for each of 2 workers, not 4"
    ):
        BucketBatchSampler([1] * 4, 3, world_size=2)
    with pytest.raises(ValueError, match="rank must be from 0 to 1, not 2"):
        BucketBatchSampler(LENGTHS, 3, rank=2, world_size=2)
    with pytest.raises(ValueError, match="batch_size must be at least 1, not 0"):
        BucketBatchSampler(LENGTHS, 0)


def test_token_batches_obey_their_limits() -> None:
    dataset = SimpleNamespace(sizes=LENGTHS.astype(np.int64), shuffle=True)
    for max_tokens, max_sentences, multiple in (
        (200, None, 8),
        (200, 6, 1),
        (None, 10, 4),
        (61, None, 8),
    ):
        batches = get_batches(dataset, max_tokens, max_sentences, multiple, seed=4)
        assert sorted(flat(batches)) == list(range(103))
        for batch in batches:
            assert max_tokens is None or len(batch) * LENGTHS[batch].max() <= max_tokens
            assert max_sentences is None or len(batch) <= max_sentences
        uneven = [batch for batch in batches if len(batch) > multiple and len(batch) % multiple]
        assert len(uneven) <= 1  # the last one
    assert (
        get_batches(dataset, 200, seed=1)
        == get_batches(dataset, 200, seed=1)
        != get_batches(dataset, 200, seed=2)
    )
    plain = get_batches(SimpleNamespace(sizes=dataset.sizes, shuffle=False), 200, shuffle=False)
    sizes = LENGTHS[flat(plain)]
    assert (np.diff(sizes) >= 0).all()
    with pytest.raises(
        ValueError, match="max_tokens must be at least 58, the tokens of pair 43, not 57"
    ):
        get_batches(dataset, 57)
    with pytest.raises(ValueError, match="bsz_mult must be at least 1, not 0"):
        get_batches(dataset, 100, bsz_mult=0)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_worker_gets_as_many_token_batches(world_size: int) -> None:
    batches = [[i] for i in range(11)]
    for drop_last in (True, False):
        shares = [
            shard_batches(batches, rank, world_size, drop_last=drop_last)
            for rank in range(world_size)
        ]
        assert len({len(share) for share in shares}) == 1
        seen = sorted(i for share in shares for batch in share for i in batch)
        assert seen == list(range(11 // world_size * world_size if drop_last else 11))
    with pytest.raises(ValueError, match="rank must be from 0 to 3, not 4"):
        shard_batches(batches, 4, 4)
    with pytest.raises(ValueError, match="must have one for each of 4 workers, not 3 in total"):
        shard_batches(batches[:3], 0, 4)


def test_collater_makes_what_the_transformer_takes(real: tuple[Path, Path]) -> None:
    root, cache = real
    dataset = Multi30k(root, validation=True, vocab_size=1200, cache_dir=cache).for_transformer(
        seq_len_multiple=8
    )
    samples = [dataset[i] for i in (4, 9, 2)]
    batch = dataset.collater(samples)
    assert batch["id"].tolist() == [4, 9, 2] and batch["ntokens"] == sum(
        len(s["target"]) for s in samples
    )
    inputs, target = batch["net_input"], batch["target"]
    assert inputs["src_tokens"].shape[1] % 8 == target.shape[1] % 8 == 0
    for row, sample in enumerate(samples):
        source, translation = sample["source"], sample["target"]
        assert inputs["src_lengths"][row] == len(source)
        assert torch.equal(inputs["src_tokens"][row, -len(source) :], source)
        assert (inputs["src_tokens"][row, : -len(source)] == 0).all()
        assert (
            torch.equal(target[row, : len(translation)], translation)
            and (target[row, len(translation) :] == 0).all()
        )
        assert inputs["prev_output_tokens"][row, 0] == 1
        assert torch.equal(
            inputs["prev_output_tokens"][row, 1 : len(translation)], translation[:-1]
        )
    other = Multi30k(root, validation=True, vocab_size=1200, cache_dir=cache).for_transformer(
        left_pad=(False, True)
    )
    shifted = other.collater(samples)
    assert shifted["net_input"]["src_tokens"][0, 0] != 0 and shifted["target"][:, -1].tolist() == [
        1,
        1,
        1,
    ]
    assert dataset.collater([]) == {}


def test_loaders_with_processes_give_the_same_batches(real: tuple[Path, Path]) -> None:
    """Data sets, samplers and collate functions can be sent to processes: no pickles of open files
    or closures."""
    import pickle

    pairs = Multi30k(real[0], validation=True, vocab_size=1200, cache_dir=real[1])
    for dataset in (pairs, pairs.for_transformer()):
        copy = pickle.loads(pickle.dumps(dataset))
        assert len(copy) == len(dataset)
    sampler = pickle.loads(pickle.dumps(BucketBatchSampler(pairs.sizes, 16, shuffle=False)))
    loader = DataLoader(
        pairs, batch_sampler=sampler, collate_fn=pickle.loads(pickle.dumps(build_collate_fn()))
    )
    assert sum(source.shape[1] for (source, _), _ in loader) == 60


def test_long_sentences(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Training leaves long pairs out; other parts stay whole, with their sentences cut."""
    long = {
        lang: ["kurz .", "eins zwei drei vier fünf sechs sieben .", "auch kurz"]
        for lang in ("en", "de")
    }
    write_text(tmp_path, "train", long)
    write_text(tmp_path, "test", long)
    load = functools.partial(
        WMT17Dataset, tmp_path, vocab_size=128, min_character_count=1, max_positions=(6, 9)
    )
    train = load(train=True, cache_dir=tmp_path / "cache")
    assert "1 of 3 pairs are left out" in caplog.text and train.indices.tolist() == [0, 2]
    test = load(test=True, cache_dir=tmp_path / "cache")
    assert (
        len(test) == 3
        and test.lengths.tolist()[1] == [6, 9]
        and "1 of 3 pairs are cut" in caplog.text
    )
    assert len(test[1]["source"]) == 6 and test[1]["source"][-1] == 1 and test[1]["target"][-1] == 1
    assert test.sizes.tolist()[1] == 9
    with pytest.raises(ValueError, match=r"max_positions must be at least 2 each, .* not \(1, 9\)"):
        load(test=True, max_positions=(1, 9), cache_dir=tmp_path / "cache")


def test_divided_text_is_read_with_its_vocabulary(tmp_path: Path) -> None:
    text = {"en": ["the do@@ g &amp; c@@ at"], "de": ["der H@@ und"]}
    write_text(tmp_path, "train.tok.clean.bpe.32000", text)
    write_text(tmp_path, "validation", text)
    with pytest.raises(DatasetNotFoundError, match=r"has no vocabulary vocab\.bpe\.NAME"):
        WMT16Dataset(tmp_path, train=True, preprocessed=True)
    (tmp_path / "vocab.bpe.32000").write_text("<unk>\n<s>\n</s>\nthe\ndo@@\ng\nder\nH@@\nund\n")
    for lazy in (False, True):
        dataset = WMT16Dataset(tmp_path, train=True, preprocessed=True, lazy=lazy)
        assert [side.tolist() for side in dataset[0]] == [[2, 4, 5, 6, 1, 1, 1, 3], [2, 7, 8, 9, 3]]
        assert isinstance(dataset.part.store.source.numbers.base, np.memmap) is lazy
        assert dataset.tokenizer.detokenize(dataset[0][1]) == "der Hund"
    (tmp_path / "bpe.32000").write_text(
        "#version: 0.2\nd o\n"
    )  # which must not be applied a second time
    again = WMT16Dataset(tmp_path, train=True, preprocessed=True)
    assert torch.equal(again[0][0], dataset[0][0])
    assert again.tokenizer.segment("dog") == [2, 5, 6, 3]  # raw text is divided
    validation = WMT16Dataset(tmp_path, validation=True, preprocessed=True)
    with pytest.raises(ValueError, match="references must be raw text"):
        validation.references()
    (tmp_path / "validation.en").unlink()
    with pytest.raises(
        DatasetError, match=r"has no newstest2014\.tok\.bpe\.32000\.en: pass preprocessed=False"
    ):
        WMT16Dataset(tmp_path, validation=True, preprocessed=True)
    (tmp_path / "validation.bin").write_bytes(b"\x80\x02cposix\nsystem\n.")
    with pytest.raises(
        DatasetError, match=r"validation\.bin, data that version 3\.0 prepared, .* put its text"
    ):
        WMT16Dataset(tmp_path, validation=True, preprocessed=True)


def test_packages_export_what_scripts_of_3_0_import() -> None:
    from mlbench_core.dataset.nlp.pytorch.wmt16 import WMT16Tokenizer as Tokenizer
    from mlbench_core.dataset.nlp.pytorch.wmt16 import build_collate_fn as collate
    from mlbench_core.dataset.nlp.pytorch.wmt16 import wmt16_config
    from mlbench_core.dataset.nlp.pytorch.wmt16.batching import build_collate_fn
    from mlbench_core.dataset.nlp.pytorch.wmt16.wmt16_tokenizer import WMT16Tokenizer
    from mlbench_core.dataset.nlp.pytorch.wmt17 import Dictionary as Symbols
    from mlbench_core.dataset.nlp.pytorch.wmt17 import collate_batch
    from mlbench_core.dataset.nlp.pytorch.wmt17.wmt17_dictionary import Dictionary

    assert (Tokenizer, collate, Symbols) == (WMT16Tokenizer, build_collate_fn, Dictionary)
    ids = {name: getattr(wmt16_config, name) for name in ("PAD", "UNK", "BOS", "EOS")}
    assert ids == {"PAD": 0, "UNK": 1, "BOS": 2, "EOS": 3}
    assert wmt16_config.EOS_TOKEN == "</s>"
    source = torch.tensor([5, 9])
    batch = collate_batch([{"id": 0, "source": source, "target": source}], 0, 9, False, True, 3)
    assert batch["net_input"]["src_tokens"].tolist() == [[5, 9, 0]]
    assert (batch["target"].tolist(), batch["net_input"]["prev_output_tokens"].tolist()) == (
        [[0, 5, 9]],
        [[0, 9, 5]],
    )


# --- downloads ---


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SimpleNamespace]:
    """A server of tiny archives laid out like the originals."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            requests.append(self.path)

    requests: list[str] = []
    folder = tmp_path / "served"
    folder.mkdir()
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))
    ) as http:
        http.daemon_threads = True
        thread = threading.Thread(target=http.serve_forever, args=(0.02,))
        thread.start()
        url = f"http://127.0.0.1:{http.server_address[1]}"
        yield SimpleNamespace(url=url, folder=folder, requests=requests)
        http.shutdown()
        thread.join()


def serve(server: SimpleNamespace, archive: Archive, lines: dict[str, list[str]]) -> Archive:
    """Serve text in an archive with the original's name and layout."""
    name = archive.url.rsplit("/", 1)[1]
    with tarfile.open(server.folder / name, "w:gz") as tar:
        for lang, side in (("en", "src"), ("de", "ref")):
            text = lines[lang]
            if archive.member.endswith(".sgm"):
                text = [
                    "<refset>",
                    *(f'<seg id="{i}">{line}</seg>' for i, line in enumerate(text, 1)),
                    "</refset>",
                ]
            content = "".join(f"{line}\n" for line in text).encode()
            entry = tarfile.TarInfo(archive.member.format(lang=lang, side=side))
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return dataclasses.replace(archive, url=f"{server.url}/{name}", lines=len(lines["en"]))


def test_wmt16_is_downloaded_checked_and_kept(
    server: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = {
        name: tuple(serve(server, a, TEXT) for a in archives)
        for name, archives in wmt16_dataset.WMT16_ARCHIVES.items()
    }
    monkeypatch.setattr(wmt16_dataset, "WMT16_ARCHIVES", served)
    root, cache = tmp_path / "root", tmp_path / "cache"
    with pytest.raises(
        DatasetNotFoundError,
        match=r"de-en\.de does not exist; download=True or 'mlbench data fetch' gets it from http",
    ):
        WMT16Dataset(root, ("de", "en"), download=False, train=True)
    train = WMT16Dataset(root, train=True, merges=30, cache_dir=cache)
    assert len(train) == 3 * 4  # the empty line is cleaned away in each of three archives
    assert train.tokenizer.detokenize(train[1][0]) == TEXT["en"][1]
    assert len(server.requests) == 3
    validation = WMT16Dataset(root, validation=True, merges=30, cache_dir=cache)
    assert validation.references() == TEXT["de"] and len(server.requests) == 4
    turned = WMT16Dataset(root, ("de", "en"), train=True, merges=30, cache_dir=cache)
    assert turned.tokenizer.detokenize(turned[1][1]) == TEXT["en"][1]
    assert len(server.requests) == 4
    with pytest.raises(
        ValueError, match=r"lang must be en and de for this data set, not \('en', 'fr'\)"
    ):
        WMT16Dataset(root, ("en", "fr"), train=True)


def test_wmt17_is_downloaded(
    server: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = {
        name: tuple(serve(server, a, TEXT) for a in archives)
        for name, archives in wmt17_dataset.WMT17_ARCHIVES.items()
    }
    monkeypatch.setattr(wmt17_dataset, "WMT17_ARCHIVES", served)
    load = functools.partial(
        WMT17Dataset,
        tmp_path / "root",
        download=True,
        vocab_size=128,
        min_character_count=1,
        cache_dir=tmp_path / "cache",
    )
    train, validation, test = load(train=True), load(validation=True), load(test=True)
    assert (len(train), len(validation), len(test)) == (12, 5, 5) and len(train.dictionary) <= 128
    assert train.dictionary == test.dictionary
    assert test.detokenize(test.dictionary.string(test[3]["target"], "@@ ")) == TEXT["de"][3]


def test_an_archive_with_other_text_is_refused_at_every_start(
    server: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """newstest2014 has 3,003 lines; a copy with fewer must not be used silently, not even when it
    is there already."""
    archive = serve(server, NEWSTEST2014, TEXT)
    served = {"validation": (dataclasses.replace(archive, lines=6),)}
    monkeypatch.setattr(wmt16_dataset, "WMT16_ARCHIVES", served)
    for _ in range(2):
        with pytest.raises(
            DownloadError, match=r"newstest2014-deen-src\.en\.sgm from .* has 5 lines, not 6"
        ):
            WMT16Dataset(tmp_path / "root", validation=True)


def test_original_archives_add_up_to_the_published_number_of_pairs() -> None:
    assert sum(archive.lines for archive in wmt16_dataset.WMT16_ARCHIVES["train"]) == 4_562_102
    assert sum(archive.lines for archive in wmt17_dataset.WMT17_ARCHIVES["train"]) == 4_590_101


@pytest.fixture(autouse=True)
def log_information(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


# --- with the models ---


def test_batches_go_through_both_models_to_text(real: tuple[Path, Path]) -> None:
    """Untrained models say nonsense, but references are the text, so that BLEU compares what it
    should."""
    from mlbench_core.models.pytorch.gnmt import GNMT, Translator
    from mlbench_core.models.pytorch.transformer import SequenceGenerator, TransformerModel
    from mlbench_core.models.pytorch.transformer.config import TransformerConfig

    pairs = Multi30k(real[0], train=True, vocab_size=1200, max_size=6, cache_dir=real[1])
    text = list(read_lines(real[0] / "train.de.gz"))[:6]
    source, target = build_collate_fn()([pairs[i] for i in range(6)])
    translator = Translator(
        GNMT(pairs.vocab_size, 8, 2), pairs.tokenizer, beam_size=2, max_seq_len=5
    )
    translations, references = translator.translate(source, target)
    assert references == text and len(translations) == 6

    other = pairs.for_transformer()
    model = TransformerModel(TransformerConfig.preset("small"), other.src_dict, other.trg_dict)
    batch = other.collater([other[i] for i in range(len(other))])
    assert model(**batch["net_input"])[0].shape == (*batch["target"].shape, len(other.dictionary))
    generator = SequenceGenerator(model, other.src_dict, other.trg_dict, maxlen=3)
    translations, references = generator.translate_batch(batch, remove_bpe="@@ ", ignore_case=False)
    assert [other.detokenize(line) for line in references] == text and len(translations) == 6
