"""Sub-tokens in the file format of Tensor2Tensor: numbers worked out by hand, and text that comes
back exactly."""

from __future__ import annotations

import functools
import gzip
import hashlib
import pickle
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlbench_core.dataset.nlp.pytorch import WMT17Dataset, pair_text
from mlbench_core.dataset.nlp.pytorch.pair_store import PairStore
from mlbench_core.dataset.nlp.pytorch.subtoken_vocabulary import SubtokenVocabulary
from mlbench_core.errors import DatasetError, DatasetNotFoundError
from tests.helpers.data import test_data
from tests.helpers.subtokens import ESCAPES, write_subtokens
from tests.helpers.thorough import examples

# The numbers are 0 to 6 for these lines, \ 7, _ 8, u 9, ; 10, 11 to 20 for the digits, and t 21, h
# 22, e 23, n 24, comma 25, space 26, dot 27.
LINES = ["'<pad>'", "'<EOS>'", "', _'", '"the_"', "'the'", "'n_'  ", "'''"]
LINES += [f"'{c}'" for c in f"{ESCAPES}then, ."]

repeatable = settings(derandomize=True, database=None, deadline=None, max_examples=examples(200))
# Many of the characters that have a meaning in the format, and any others.
texts = st.text(
    st.one_of(st.sampled_from("ab_\\;u019 \n\u00a0é漢"), st.characters(exclude_categories=["Cs"]))
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "vocab.ende.28"
    path.write_text("".join(f"{line}\n" for line in LINES), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("", []),
        ("the the", [3, 3]),  # no space between letters and digits
        ("then", [4, 5]),  # the longest first, not the_
        ("the, then", [3, 2, 4, 5]),
        (" the ", [26, 8, 3, 26, 8]),
        ("t  e", [21, 8, 26, 26, 8, 23, 8]),
        (" ", [26, 8]),
        (".'", [27, 6, 8]),
        ("a_b", [7, 20, 18, 10, 8, 7, 9, 8, 7, 20, 19, 10, 8]),  # \97;_ \u_ \98;_
        ("\\", [7, 7, 8]),
        ("tü", [21, 7, 13, 16, 13, 10, 8]),  # t\252;_
        ("\n", [7, 12, 11, 10, 8]),
        (
            "<pad>",
            [
                7,
                17,
                11,
                10,
                8,
                *(7, 12, 12, 13, 10),
                *(7, 20, 18, 10),
                *(7, 12, 11, 11, 10),
                8,
                7,
                17,
                13,
                10,
                8,
            ],
        ),
    ],
)
def test_numbers_are_those_that_the_rules_give(file: Path, text: str, numbers: list[int]) -> None:
    vocabulary = SubtokenVocabulary.load(file)
    assert vocabulary.encode([text])[0].tolist() == numbers
    assert vocabulary.decode(numbers) == text
    assert vocabulary.join(" ".join(vocabulary.symbols[number] for number in numbers)) == text


def test_a_file_is_read_as_it_is(file: Path) -> None:
    vocabulary = SubtokenVocabulary.load(file)
    assert vocabulary.subtokens == [
        "<pad>",
        "<EOS>",
        ", _",
        "the_",
        "the",
        "n_",
        "'",
        *ESCAPES,
        *"then, .",
    ]
    assert vocabulary.symbols[2] == r",\32;_" and vocabulary.size == 28
    assert not any(" " in symbol for symbol in vocabulary.symbols)
    plain = "".join(f"'{subtoken}'\n" for subtoken in vocabulary.subtokens).encode()
    assert vocabulary.checksum == hashlib.sha256(plain).hexdigest()
    # Tensor2Tensor's form of the first two.
    packed = file.with_name("vocab.gz")
    packed.write_bytes(
        gzip.compress(plain.replace(b"<pad>", b"<pad>_").replace(b"<EOS>", b"<EOS>_"))
    )
    other = SubtokenVocabulary.load(packed)
    assert other.subtokens[:2] == ["<pad>_", "<EOS>_"] and other.checksum != vocabulary.checksum
    assert other.encode(["the, then"])[0].tolist() == vocabulary.encode(["the, then"])[0].tolist()
    assert pickle.loads(pickle.dumps(other)).decode([3, 2, 4, 5]) == "the, then"


def test_numbers_that_no_text_has_become_text_too(file: Path) -> None:
    vocabulary = SubtokenVocabulary.load(file)
    assert vocabulary.decode([0, 3, 1, 3]) == "the"  # padding, and a number after the end
    assert vocabulary.decode([8, 8, 3, 7, 8, 4]) == "the\\the"
    for code in (0xD800, 0x110000, 10**30):
        assert vocabulary.decode([7, *(11 + int(digit) for digit in str(code)), 10, 8]) == "\u3013"
    with pytest.raises(IndexError, match="numbers must be from 0 to 27, not 28"):
        vocabulary.decode([28])


@repeatable
@example([], "\\_ \\u_\\32; \\\\ _")
@given(st.lists(texts.filter(bool), max_size=30), texts)
def test_every_text_comes_back_from_any_vocabulary(subtokens: list[str], text: str) -> None:
    chosen = dict.fromkeys([*ESCAPES, *subtokens, *"".join(subtokens)])
    unique = {subtoken.replace(" ", r"\32;"): subtoken for subtoken in chosen}
    vocabulary = SubtokenVocabulary(["<pad>", "<EOS>", *unique.values()])
    (numbers,) = vocabulary.encode([text])
    assert vocabulary.decode(numbers).encode() == text.encode()
    assert vocabulary.join(" ".join(vocabulary.symbols[number] for number in numbers)) == text
    assert len(numbers) == 0 or 2 <= numbers.min() <= numbers.max() < vocabulary.size


def test_lines_of_news_come_back(file: Path) -> None:
    lines = (
        test_data("newstest2014", "newstest2014.de").read_text(encoding="utf-8").split("\n")[:500]
    )
    vocabulary = SubtokenVocabulary.load(file)
    assert [vocabulary.decode(numbers) for numbers in vocabulary.encode(lines)] == lines


def test_letters_and_digits_are_the_categories_l_and_n() -> None:
    """The format is defined by the categories; the code asks ``isalnum``."""
    characters = map(chr, range(sys.maxunicode + 1))
    assert not [c for c in characters if c.isalnum() != (unicodedata.category(c)[0] in "LN")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "line 1 must be the sub-token <pad>, not nothing"),
        ("'<EOS>'\n'<pad>'\n", "line 1 must be the sub-token <pad>, not <EOS>"),
        ("'<pad>'\n'the_'\n", "line 2 must be the sub-token <EOS>, not the_"),
        ("the@@\nof\n", "line 1 is 'the@@', not a sub-token in quotes"),
        ("'<pad>'\n'\n", 'line 2 is "\'", not a sub-token in quotes'),
        ("'<pad>'\n'<EOS>\"\n", "not a sub-token in quotes"),
        ("'<pad>'\n'<EOS>'\n\n", "line 3 is '', not a sub-token in quotes"),
        ("'<pad>'\n'<EOS>'\n''\n", "line 3 must be a sub-token, not empty"),
        ("'<pad>'\n'<EOS>'\n'a'\n'b'\n\"a\"\n", "not 'a' in both lines 3 and 5"),
        ("'<pad>'\n'<EOS>'\n'a b'\n'a\\32;b'\n", "in both lines 3 and 4"),
        ("\n".join(LINES).replace("';'\n", "").replace("'7'\n", ""), "but 2 are missing: '7' ';'"),
        ("\n".join([*LINES, "'dogs_'"]), "but 4 are missing: 'd' 'g' 'o' 's'"),
    ],
)
def test_files_that_are_no_vocabulary_are_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "vocab.ende.32768"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(DatasetError) as caught:
        SubtokenVocabulary.load(path)
    assert str(caught.value).startswith(f"{path} is not a vocabulary of sub-tokens: ")
    assert message in str(caught.value)


def test_files_in_another_encoding_and_missing_ones_are_named(tmp_path: Path) -> None:
    path = tmp_path / "vocab.ende.32768"
    with pytest.raises(
        DatasetNotFoundError, match=r"the vocabulary .*vocab\.ende\.32768 does not exist"
    ):
        SubtokenVocabulary.load(path)
    for encoding in ("latin-1", "utf-16"):
        path.write_bytes("\n".join([*LINES, "'ü'"]).encode(encoding))
        with pytest.raises(DatasetError, match=r"vocab\.ende\.32768 is not UTF-8 text"):
            SubtokenVocabulary.load(path)


# --- in a data set ---

PAIRS = {
    "en": [
        "A dog runs.",
        "  It's a _dog_ \\ ☃!",
        "",
        "one two three four five six seven eight nine ten",
        "x",
    ],
    "de": ["Ein Hund rennt.", "Es ist ein\u00a0_Hund_ \\ ☃!\r", "leer", "eins", "y"],
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "wmt17"
    folder.mkdir()
    for name in ("train", "test"):
        for lang, lines in PAIRS.items():
            (folder / f"{name}.{lang}").write_bytes("".join(f"{line}\n" for line in lines).encode())
    return folder


def test_wmt17_has_the_numbers_of_the_file(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        pair_text, "split_words", lambda *_: pytest.fail("the vocabulary splits lines itself")
    )
    (root / "vocab.bpe.1").write_text("a\n")  # the argument is preferred
    file = write_subtokens(tmp_path / "vocab.ende.32768", "dog_", "Hund_", "._", *"aint ")
    load = functools.partial(WMT17Dataset, root, vocabulary=file, cache_dir=tmp_path / "cache")
    test, train = load(test=True), load(train=True)
    vocabulary = SubtokenVocabulary.load(file)
    assert test.dictionary.symbols == vocabulary.symbols and test.dictionary == train.dictionary
    assert (test.dictionary.pad(), test.dictionary.eos(), test.dictionary.index("dog_")) == (
        0,
        1,
        2,
    )
    # The file ends its second line with CR and LF, which are one end of a line.
    assert test.references() == [line.rstrip("\r") for line in PAIRS["de"]]
    for index, (source, target) in enumerate(zip(PAIRS["en"], PAIRS["de"], strict=True)):
        for side, line in (("source", source), ("target", target)):
            numbers = test[index][side]
            assert numbers.tolist() == [*vocabulary.encode([line.strip()])[0].tolist(), 1]
            assert vocabulary.decode(numbers.tolist()) == line.strip()
            assert test.detokenize(test.dictionary.string(numbers)) == line.strip()
    # Without the empty line, and without the line of ten words whose translation has one.
    assert [vocabulary.decode(train[index]["target"].tolist()) for index in range(len(train))] == [
        PAIRS["de"][number].strip() for number in (0, 1, 4)
    ]


def test_prepared_data_belongs_to_its_vocabulary(root: Path, tmp_path: Path) -> None:
    def store(file: Path, **options: Any) -> PairStore:
        return WMT17Dataset(
            root, test=True, vocabulary=file, cache_dir=tmp_path / "cache", **options
        ).part.store

    one = write_subtokens(tmp_path / "one", "dog_", "Hund_")
    two = write_subtokens(tmp_path / "two", "Hund_", "dog_")
    checksums = [SubtokenVocabulary.load(file).checksum for file in (one, two)]
    first, second = store(one), store(two)
    assert first.folder != second.folder
    assert [each.header.vocabulary_checksum for each in (first, second)] == checksums
    assert first.header.vocabulary_size == SubtokenVocabulary.load(one).size
    with pytest.raises(DatasetError, match=f"the vocabulary {checksums[1]}, not {checksums[0]}"):
        PairStore(second.folder, vocabulary_checksum=checksums[0])
    moved = tmp_path / "moved"
    moved.write_bytes(one.read_bytes().replace(b"'dog_'", b'"dog_"'))
    assert store(moved).folder == first.folder
    # The file itself counts, not its name.
    one.write_bytes(two.read_bytes())
    assert store(one).folder == second.folder
    with pytest.raises(DatasetNotFoundError, match=r"the vocabulary .*three does not exist"):
        store(tmp_path / "three", download=True)
