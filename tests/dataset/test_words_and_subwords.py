"""Words that can be undone, byte pair encoding, and the tokenizer of task 4a."""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mlbench_core.dataset.nlp.pytorch import BucketBatchSampler, get_batches
from mlbench_core.dataset.nlp.pytorch.subwords import Subwords, learn_subwords, learn_words
from mlbench_core.dataset.nlp.pytorch.wmt16.wmt16_tokenizer import WMT16Tokenizer
from mlbench_core.dataset.nlp.pytorch.words import (
    SPACING_MARK,
    clean_line,
    escape_words,
    join_words,
    split_words,
)
from mlbench_core.errors import DatasetError, DatasetNotFoundError
from tests.helpers.data import test_data
from tests.helpers.processes import ROOT, environment

HARD_LINES = [
    "He said: \"Well ... it's 5 % of $ 3.50 (or £2,000)\", didn't he?",
    "„Das“ und ‚dies‘ z.B. am 3. Mai — Sulzbachweg / Kirchstraße, d.h. ›Grub‹.",
    "a@@ b@@ @@ c</w> & &amp; <s> | [x] {y} #1 C++ http://a.b/c?d=e&f=%20 me@x.org",
    "rock 'n' roll ' ' \" \" ''quoted'' `` -- --- ... .... Ph.D. U.S.-led",
    "Ünïcödé 漢字 かな हिन्दी 👍🏽 e\u0301 \u200bzero\u200d",
    "",
    "-",
]


def read(*parts: str) -> list[str]:
    return test_data(*parts).read_text(encoding="utf-8").removesuffix("\n").split("\n")


def divide(lines: list[str], subwords: Subwords) -> list[list[str]]:
    return [[subwords.symbols[i - 1] for i in numbers] for numbers in subwords.encode(lines)]


@pytest.mark.parametrize("lang", ["en", "de"])
def test_every_line_of_newstest2014_comes_back_from_its_ids(lang: str, tmp_path: Path) -> None:
    lines = read("newstest2014", f"newstest2014.{lang}")
    assert len(lines) == 3003 and [clean_line(line) for line in lines] == lines
    words = [" ".join(split_words(line, lang)) for line in lines]
    learn_subwords(words, merges=2000).save(tmp_path, "2000")
    tokenizer = WMT16Tokenizer(tmp_path)
    restored = [tokenizer.detokenize(tokenizer.segment(line, lang=lang)) for line in lines]
    different = [pair for pair in zip(lines, restored, strict=True) if pair[0] != pair[1]]
    assert not different, (
        f"{len(different)} of {len(lines)} lines differ, the first are {different[:3]}"
    )
    marked = sum(SPACING_MARK in line for line in words)
    assert 0 < marked < 0.03 * len(lines)  # so nearly all words are plain Moses words
    assert tokenizer.detokenize(tokenizer.segment(f"{lines[7]}\u4e00")) == f"{lines[7]}<unk>"


@pytest.mark.parametrize("lang", ["en", "de"])
@pytest.mark.parametrize("line", HARD_LINES)
def test_hard_lines_come_back(line: str, lang: str) -> None:
    words = split_words(line, lang)
    assert join_words(words) == clean_line(line)
    assert not any(" " in word or not word for word in words)


def test_cleaning_leaves_one_space_and_no_control_characters() -> None:
    assert clean_line("\u00a0a\t b\u2009c\x00\x07\n") == "a b c"
    assert SPACING_MARK not in clean_line(f"a {SPACING_MARK} b")


def test_words_of_a_model_need_not_be_well_formed() -> None:
    assert join_words([SPACING_MARK, SPACING_MARK]) == ""
    assert join_words(["a", SPACING_MARK, SPACING_MARK, "b", SPACING_MARK]) == "a b"
    assert join_words(["a", "b", "."], delim="_") == "a_b."


def test_unknown_tokenizer_is_named() -> None:
    with pytest.raises(ValueError, match="tokenizer must be 'moses' or 'spacy', not 'blank'"):
        split_words("a", tokenizer="blank")


def test_spacy_words_come_back() -> None:
    pytest.importorskip("spacy", reason="spaCy is not installed: pip install 'mlbench-core[spacy]'")
    for line in HARD_LINES:
        assert join_words(split_words(line, "de", "spacy")) == clean_line(line)
    assert split_words("It isn't.", "en", "spacy") == ["It", "is", SPACING_MARK, "n't", "."]


def count_pairs(words: Counter[tuple[str, ...]]) -> Counter[tuple[str, str]]:
    pairs: Counter[tuple[str, str]] = Counter()
    for word, count in words.items():
        for pair in itertools.pairwise(word):
            pairs[pair] += count
    return pairs


def apply(word: tuple[str, ...], pair: tuple[str, str]) -> list[str]:
    done: list[str] = []
    for part in word:
        if done and (done[-1], part) == pair:
            done[-1] += part
        else:
            done.append(part)
    return done


def test_merges_and_division_are_those_of_the_plain_algorithm() -> None:
    """The paper's loop: count all pairs, merge the most frequent one (of several, any will do), and
    count anew."""
    lines = [" ".join(split_words(line)) for line in read("newstest2014", "newstest2014.en")[:10]]
    words = Counter((*w[:-1], w[-1] + "</w>") for line in lines for w in line.split())
    subwords = learn_subwords(lines, merges=60)
    assert subwords.merges is not None and len(subwords.merges) == 60
    for merge in subwords.merges:
        pairs = count_pairs(words)
        assert pairs[merge] == max(pairs.values())
        merged: Counter[tuple[str, ...]] = Counter()
        for word, count in words.items():
            merged[tuple(apply(word, merge))] += count
        words = merged
    divided = {"".join(parts).removesuffix("</w>"): parts for parts in words}
    for line, symbols in zip(lines, divide(lines, subwords), strict=True):
        parts = [part for word in line.split() for part in divided[word]]
        assert symbols == [
            p.removesuffix("</w>") if p.endswith("</w>") else p + "@@" for p in parts
        ]


def test_learning_counts_symbols_and_leaves_out_rare_characters() -> None:
    lines = ["aba aba ab ab ab ba"] * 3 + ["漢 aba"]
    assert len(learn_subwords(lines, size=8)) == 8
    assert "漢" in learn_subwords(lines, merges=1).symbols
    subwords = learn_subwords(lines, merges=1, min_character_count=2)
    assert "漢" not in subwords.symbols
    assert subwords.encode(["漢"])[0].tolist() == [0]
    with pytest.raises(
        ValueError, match="size must be at least 5, the number of characters of the text, not 3"
    ):
        learn_subwords(["ab ba"], size=3)
    with pytest.raises(ValueError, match="one of merges and size must be given"):
        learn_subwords(["ab"], size=3, merges=3)


def test_whole_words_are_numbered_by_frequency() -> None:
    words = learn_words(["b a b", "a c"], min_count=2)
    assert words.symbols == ["a", "b", SPACING_MARK]
    assert words.encode(["c b a"])[0].tolist() == [0, 2, 1]


def digest_of_all(folder: str) -> str:
    """Learn, divide and make batches; the digest of what comes of it."""
    lines = read("newstest2014", "newstest2014.de")[:400]
    subwords = learn_subwords(lines, merges=1500)
    subwords.save(Path(folder), "1500")
    numbers = subwords.encode(lines)
    sizes = np.array([len(line) for line in numbers])
    batches = get_batches(SimpleNamespace(sizes=sizes, shuffle=True), 500, seed=3)
    buckets = list(BucketBatchSampler(sizes, 8, seed=3))
    content = [subwords.checksum, [line.tolist() for line in numbers], batches, buckets]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def test_ids_and_batches_are_the_same_in_every_process(tmp_path: Path) -> None:
    """Python's and the trainer's hashes differ from process to process."""
    here = digest_of_all(str(tmp_path / "here"))
    script = (
        "import sys; from tests.dataset.test_words_and_subwords import "
        "digest_of_all as f; print(f(sys.argv[1]))"
    )
    there = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "there")],
        env=environment(PYTHONHASHSEED="77"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    assert there.stdout.strip() == here
    for name in ("bpe.1500", "vocab.bpe.1500"):
        assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "there" / name).read_bytes()
    again = learn_subwords(read("newstest2014", "newstest2014.de")[399::-1], merges=1500)
    assert Subwords.load(tmp_path / "there").checksum == again.checksum


def test_files_that_are_no_vocabulary_are_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetNotFoundError, match=r"has no vocabulary vocab\.bpe\.NAME"):
        Subwords.load(tmp_path)
    (tmp_path / "vocab.bpe.5").write_text("a\nb\na\n")
    with pytest.raises(DatasetError, match="symbols must be different, not contain 'a' twice"):
        Subwords.load(tmp_path)
    (tmp_path / "vocab.bpe.5").write_text("a\nb\n")
    (tmp_path / "bpe.5").write_text("a b\n")
    with pytest.raises(DatasetError, match=r"does not begin with '#version: 0.2'"):
        Subwords.load(tmp_path)
    (tmp_path / "bpe.5").write_text("#version: 0.2\na b</w>\nabc\n")
    with pytest.raises(DatasetError, match=r"bpe\.5, line 3: 'abc' is not a pair"):
        Subwords.load(tmp_path)
    for content, line in (("the 5\nof\n", "the 5"), ("the\r\nof\r\n", r"the\\r")):
        (tmp_path / "vocab.bpe.5").write_bytes(content.encode())
        with pytest.raises(
            DatasetError, match=rf"vocab\.bpe\.5 is not a vocabulary: '{line}' is not one symbol"
        ):
            Subwords.load(tmp_path)
    (tmp_path / "vocab.bpe.6").write_text("a\nb\n")
    with pytest.raises(DatasetError, match=r"several vocabularies, vocab\.bpe\.5, vocab\.bpe\.6"):
        Subwords.load(tmp_path)


def test_counts_that_subword_nmt_writes_are_no_part_of_symbols(tmp_path: Path) -> None:
    (tmp_path / "vocab.bpe.3").write_text("the 9107\ndo@@ 12\ng 12\n2 1\n")
    subwords = Subwords.load(tmp_path)
    assert subwords.symbols == ["the", "do@@", "g", "2"]
    assert subwords.encode(["the do@@ g 2"])[0].tolist() == [1, 2, 3, 4]


def test_tokenizer_reads_a_published_vocabulary_and_fills_it_up(tmp_path: Path) -> None:
    (tmp_path / "vocab.bpe.32000").write_text(
        "<unk>\n<s>\n</s>\n,\nHal@@\nlo\nWelt\n!\n", encoding="utf-8"
    )
    tokenizer = WMT16Tokenizer(tmp_path)
    assert tokenizer.vocab_size == len(tokenizer) == 9
    assert (tokenizer.pad, tokenizer.unk, tokenizer.bos, tokenizer.eos) == (0, 1, 2, 3)
    ids = tokenizer.segment("Hal@@ lo , Welt !")  # no merges: divided already
    assert ids == [2, 5, 6, 4, 7, 8, 3]
    assert tokenizer.detokenize(ids) == "Hallo, Welt!"
    assert tokenizer.detokenize(torch.tensor([2, 5, 6, 1, 3, 7, 0])) == "Hallo <unk>"
    assert WMT16Tokenizer(tmp_path, math_precision="fp16").vocab_size == 16
    assert WMT16Tokenizer(tmp_path, math_precision="fp32").vocab_size == 9
    with pytest.raises(
        ValueError, match=r"math_precision must be one of None, 'fp32', 'fp16', 'bf16', not 'half'"
    ):
        WMT16Tokenizer(tmp_path, math_precision="half")
    with pytest.raises(IndexError, match="ids must be from 0 to 8, not 9"):
        tokenizer.detokenize([9])


def test_tokenizer_reads_and_writes_escapes_of_other_programs(tmp_path: Path) -> None:
    (tmp_path / "vocab.bpe.3").write_text("it\n&apos;s\nwell\n@-@\nknown\n&amp;\n")
    divided = WMT16Tokenizer(tmp_path, escaped=True)
    assert (
        divided.detokenize(divided.segment("it &apos;s well @-@ known &amp;"))
        == "it's well-known &"
    )
    line = HARD_LINES[2]
    learn_subwords([" ".join(escape_words(split_words(line)))], merges=90).save(
        tmp_path / "own", "90"
    )
    tokenizer = WMT16Tokenizer(tmp_path / "own", escaped=True)
    assert tokenizer.detokenize(tokenizer.segment(line)) == line
    assert "&amp;" in tokenizer.symbols and "&" not in tokenizer.symbols


def test_tokenizer_brings_raw_lines_back(tmp_path: Path) -> None:
    lines = [line for line in HARD_LINES if line]
    learn_subwords([" ".join(split_words(line)) for line in lines], merges=50, separator="##").save(
        tmp_path, "50"
    )
    tokenizer = WMT16Tokenizer(tmp_path, separator="##")
    for line in lines:
        ids = tokenizer.segment(line)
        assert ids[0] == tokenizer.bos and ids[-1] == tokenizer.eos and tokenizer.unk not in ids
        assert tokenizer.detokenize(np.array(ids)) == clean_line(line)
