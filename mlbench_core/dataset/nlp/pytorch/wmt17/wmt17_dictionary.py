"""The vocabulary of task 4b: symbols and their numbers."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

__all__ = ["Dictionary"]


class Dictionary:
    """A mapping between symbols and consecutive numbers from 0.

    Padding has number 0 and the end of a sentence 1; the other symbols follow in the order in which
    they are added.

    Args:
        pad: Symbol of the padding.
        eos: Symbol of the end of a sentence, which also starts a translation.
        symbols: Symbols to add.

    Raises:
        ValueError: ``pad`` and ``eos`` are equal.

    Example:
        >>> import torch
        >>> dictionary = Dictionary(symbols=["a_", "fine_", "wor@@", "d"])
        >>> len(dictionary), dictionary.pad(), dictionary.eos()
        (6, 0, 1)
        >>> dictionary.index("fine_"), dictionary[3]
        (3, 'fine_')
        >>> dictionary.string(torch.tensor([4, 5, 1, 0]), bpe_symbol="@@ ")
        'word'
    """

    def __init__(
        self, pad: str = "<pad>_", eos: str = "<EOS>_", *, symbols: Iterable[str] = ()
    ) -> None:
        if pad == eos:
            raise ValueError(f"pad and eos must be different symbols, not both {pad!r}")
        self.symbols: list[str] = []
        self._numbers: dict[str, int] = {}
        # Add these first, because models and batches rely on the numbers 0 and 1.
        self._pad = self.add_symbol(pad)
        self._eos = self.add_symbol(eos)
        for symbol in symbols:
            self.add_symbol(symbol)

    def pad(self) -> int:
        """Return the number of the padding."""
        return self._pad

    def eos(self) -> int:
        """Return the number of the end of a sentence."""
        return self._eos

    def index(self, sym: str) -> int:
        """Return the number of a symbol.

        Raises:
            KeyError: The symbol is not in the vocabulary.
        """
        if sym not in self._numbers:
            raise KeyError(
                f"{sym!r} is not among the {len(self)} symbols of the vocabulary; add_symbol "
                "adds it"
            )
        return self._numbers[sym]

    def add_symbol(self, sym: str) -> int:
        """Return the number of a symbol; add the symbol if it is new."""
        number = self._numbers.setdefault(sym, len(self.symbols))
        if number == len(self.symbols):
            self.symbols.append(sym)
        return number

    def string(self, tensor: Tensor, bpe_symbol: str | None = None) -> str:
        """Return the text of a sentence, or of several, one per line.

        Args:
            tensor: Numbers, of shape (tokens,) or (sentences, tokens).
            bpe_symbol: The mark of a divided word, with the space after it, for example ``"@@ "``.
                If ``"_"``, the last part of each word must end with ``_``, as the special symbols
                do: parts are then joined, and every ``_`` becomes a space. If None, parts are not
                joined.

        Returns:
            The symbols without padding and end, separated by spaces, with the parts of divided
            words joined.

        Raises:
            ValueError: The tensor has another number of dimensions.
            IndexError: A number is not in the vocabulary.
        """
        if tensor.dim() == 2:
            return "\n".join(self.string(row, bpe_symbol) for row in tensor)
        if tensor.dim() != 1:
            raise ValueError(
                "tensor must have shape (tokens,) or (sentences, tokens), not "
                f"{tuple(tensor.shape)}"
            )
        # Padding and end have no text.
        hidden = (self._pad, self._eos)
        symbols = [self[number] for number in tensor.tolist() if number not in hidden]
        if bpe_symbol is None:
            return " ".join(symbols)
        if bpe_symbol == "_":
            return "".join(symbols).replace("_", " ").strip()
        # The mark includes the space after it, so add a space to match it at the end of the text
        # too.
        return (" ".join(symbols) + " ").replace(bpe_symbol, "").rstrip()

    def __len__(self) -> int:
        return len(self.symbols)

    def __getitem__(self, number: int) -> str:
        if not 0 <= number < len(self.symbols):
            raise IndexError(f"number must be from 0 to {len(self.symbols) - 1}, not {number}")
        return self.symbols[number]

    def __contains__(self, sym: object) -> bool:
        return sym in self._numbers

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dictionary) and self.symbols == other.symbols

    __hash__ = None  # type: ignore[assignment]
