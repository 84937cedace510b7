"""The vocabulary of WMT17: numbers, text, and the file."""

from __future__ import annotations

import pytest
import torch

from mlbench_core.dataset.nlp.pytorch.wmt17.wmt17_dictionary import Dictionary


@pytest.fixture
def dictionary() -> Dictionary:
    return Dictionary(symbols=["ein_", "Hunde", "hals", "band_", "ein_"])


def test_padding_is_0_the_end_is_1_and_symbols_follow_in_order(dictionary: Dictionary) -> None:
    assert (dictionary.pad(), dictionary.eos()) == (0, 1)
    assert [dictionary.index(symbol) for symbol in ("<pad>_", "<EOS>_", "ein_", "band_")] == [
        0,
        1,
        2,
        5,
    ]
    assert len(dictionary) == 6
    assert dictionary[4] == "hals"
    assert "ein_" in dictionary
    assert "eine_" not in dictionary
    assert dictionary.add_symbol("hals") == 4
    assert dictionary.add_symbol("neu_") == 6


def test_special_symbols_can_have_other_names() -> None:
    other = Dictionary("<blank>", "</s>")
    assert [other[number] for number in (other.pad(), other.eos())] == ["<blank>", "</s>"]


def test_text_of_a_sentence_joins_divided_words(dictionary: Dictionary) -> None:
    tokens = torch.tensor([2, 3, 4, 5, 1])
    assert dictionary.string(tokens) == "ein_ Hunde hals band_"
    assert dictionary.string(tokens, "_") == "ein Hundehalsband"
    several = torch.tensor([[0, 0, 2, 1], [2, 5, 1, 0]])
    assert dictionary.string(several, "_") == "ein\nein band"
    divided = Dictionary(symbols=["Hunde@@", "halsband", "@@"])
    assert divided.string(torch.tensor([2, 3, 1]), "@@ ") == "Hundehalsband"
    assert divided.string(torch.tensor([1, 0])) == ""


def test_wrong_arguments_are_refused(dictionary: Dictionary) -> None:
    with pytest.raises(ValueError, match="both 'x'"):
        Dictionary("x", "x")
    with pytest.raises(KeyError, match="'Katze' is not among the 6 symbols"):
        dictionary.index("Katze")
    with pytest.raises(IndexError, match="number must be from 0 to 5, not 6"):
        dictionary.string(torch.tensor([6]))
    with pytest.raises(ValueError, match=r"not \(1, 1, 1\)"):
        dictionary.string(torch.zeros(1, 1, 1, dtype=torch.int64))
