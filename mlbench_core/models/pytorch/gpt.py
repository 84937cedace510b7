"""GPT, a causal Transformer that predicts the next token of a text."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlbench_core.arguments import check_at_least

__all__ = ["GPT", "GPTConfig", "next_token_loss"]

INITIAL_STD = 0.02
ROTARY_BASE = 10_000.0
# Tensor cores need sizes that are multiples of 64 or 128; 50,257 becomes 50,304.
VOCABULARY_MULTIPLE = 128


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a GPT.

    Attributes:
        layers: Number of layers L.
        heads: Attention heads of a layer.
        width: Features of a token; a multiple of twice the number of heads.
        context: Largest number of tokens T in a sequence.
        vocabulary: Number of different tokens.

    Raises:
        ValueError: A size is not positive, or the width cannot be divided among the heads.
    """

    layers: int
    heads: int
    width: int
    context: int
    vocabulary: int

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            check_at_least(name, size, 1)
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width must be a multiple of {2 * self.heads}, twice the number of heads, not "
                f"{self.width}: rotary positions turn pairs of features of each head"
            )

    @classmethod
    def preset(cls, name: str) -> GPTConfig:
        """Return the sizes ``gpt2`` (GPT-2's tokens), ``mini`` or ``tiny`` (both for bytes).

        Raises:
            ValueError: The name is unknown; the message lists the known ones.

        Example:
            >>> GPTConfig.preset("gpt2").padded_vocabulary
            50304
        """
        if name not in _PRESETS:
            raise ValueError(f"name must be one of {', '.join(_PRESETS)}, not {name!r}")
        return _PRESETS[name]

    @property
    def padded_vocabulary(self) -> int:
        """Return the rows of the embedding: the vocabulary, rounded up to a multiple of 128."""
        return -(-self.vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE

    @property
    def parameters(self) -> int:
        r"""Return the number of parameters, :math:`N = V d + 12 L d^2`.

        V is the padded vocabulary and d the width. The embedding counts once, because it is the
        output layer too.
        """
        return self.padded_vocabulary * self.width + 12 * self.layers * self.width**2

    def flops_per_token(self, context: int | None = None) -> int:
        r"""Return the floating-point operations that training needs for a token.

        It is :math:`6 N + 12 L d T`: a multiplication and an addition for each parameter in the
        forward pass and twice that in the backward pass, and the two matrix products of the
        attention. As usual, the latter are those of all pairs of tokens, although a causal
        attention needs half of them.

        Args:
            context: Length T of the sequences; None is the longest.

        Example:
            >>> GPTConfig.preset("gpt2").flops_per_token()
            854654976

        References:
            Chowdhery et al. 2022, PaLM, arXiv 2204.02311, appendix B.
        """
        length = context
        if length is None:
            length = self.context
        return 6 * self.parameters + 12 * self.layers * self.width * length


_PRESETS = {
    "gpt2": GPTConfig(layers=12, heads=12, width=768, context=1024, vocabulary=50_257),
    "mini": GPTConfig(layers=6, heads=6, width=192, context=256, vocabulary=256),
    "tiny": GPTConfig(layers=3, heads=4, width=128, context=128, vocabulary=256),
}


class GPT(nn.Module):
    r"""A causal Transformer with normalization before its parts.

    With the embedding E of the tokens w and the layers :math:`l`,

    .. math::
        x^0 &= E_w \\
        h^l &= x^{l-1} + \mathrm{Attention}(\mathrm{RMSNorm}(x^{l-1})) \\
        x^l &= h^l + W_2 \, \mathrm{ReLU}(W_1 \mathrm{RMSNorm}(h^l))^2 \\
        z &= \mathrm{RMSNorm}(x^L) E^\top

    The choices that GPT-2 leaves open today are those of the speed-run baseline, the repository
    ``KellerJordan/modded-nanogpt`` up to its record 5 (October 2024), which trains GPT-2 to the
    same validation loss with half of the tokens:

    * Rotary positions instead of learned ones.
    * RMSNorm without parameters, and no biases, so that every parameter is a matrix.
    * Squared ReLU instead of GELU, which needs fewer operations and trains slightly better.
    * Separate matrices of queries, keys and values, each of which Muon makes orthogonal.
    * A vocabulary that is padded to a multiple of 128, and the embedding as the output layer.

    Unlike there, queries and keys are not normalized. As in GPT-2, all weights start normal with
    the standard deviation 0.02, divided by :math:`\sqrt{2 L}` for the two matrices of a layer that
    add to the residual stream.

    Attributes:
        config: As given.
        embedding: The embedding of the tokens, which is the output layer too.
        layers: The layers.

    Args:
        config: The sizes.

    Example:
        >>> model = GPT(GPTConfig(layers=1, heads=2, width=8, context=16, vocabulary=256))
        >>> model(torch.zeros(3, 10, dtype=torch.int64)).shape
        torch.Size([3, 10, 256])

    References:
        Radford et al. 2019, Language Models are Unsupervised Multitask Learners (GPT-2).

        Su et al. 2021, RoFormer, arXiv 2104.09864 (rotary positions).

        Zhang and Sennrich 2019, Root Mean Square Layer Normalization, arXiv 1910.07467.

        So et al. 2021, Primer, arXiv 2109.08668 (squared ReLU).

        K. Jordan et al., modded-nanogpt, github.com/KellerJordan/modded-nanogpt.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.padded_vocabulary, config.width)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.layers))
        cos, sin = _rotary(config)
        # They follow from the sizes, so a checkpoint does not need them.
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialize()

    def _initialize(self) -> None:
        # Two parts of each layer add to the residual stream, whose variance would grow with their
        # number (Radford et al. 2019, section 2.3).
        residual_std = INITIAL_STD / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            std = INITIAL_STD
            if name.endswith(("attention.out.weight", "shrink.weight")):
                std = residual_std
            nn.init.normal_(parameter, std=std)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores of the next token at each place.

        Args:
            tokens: Token ids of shape (batch, length), int64; at most ``context`` of them.

        Returns:
            Scores of shape (batch, length, padded vocabulary), in the dtype of the computation.

        Raises:
            ValueError: The sequences are longer than the context.
        """
        length = tokens.shape[1]
        if length > self.config.context:
            raise ValueError(
                f"tokens must have at most {self.config.context} in a sequence, the context of the "
                f"model, not {length}: divide them into shorter sequences"
            )
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(_norm(x), self.embedding.weight)


class _Layer(nn.Module):
    """Attention, then a perceptron; both read a normalized input and add to it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention = _Attention(config)
        self.grow = nn.Linear(config.width, 4 * config.width, bias=False)
        self.shrink = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(_norm(x), cos, sin)
        return x + self.shrink(F.relu(self.grow(_norm(x))).square())


class _Attention(nn.Module):
    """Causal attention of several heads with rotary positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.width, bias=False)
        self.value = nn.Linear(config.width, config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query = _rotate(self._divide(self.query(x)), cos, sin)
        key = _rotate(self._divide(self.key(x)), cos, sin)
        value = self._divide(self.value(x))
        attended = _attend(query, key, value)
        return self.out(attended.transpose(1, 2).flatten(2))

    def _divide(self, x: Tensor) -> Tensor:
        """Return (batch, heads, length, features of a head)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the causal attention, each tensor (batch, heads, length, features of a head)."""
    if query.device.type != "cpu" or query.dtype != torch.bfloat16:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)
    # On CPUs, torch's backward pass in bfloat16 takes several times as long as in float32.
    with torch.autocast("cpu", enabled=False):
        attended = F.scaled_dot_product_attention(
            query.float(), key.float(), value.float(), is_causal=True
        )
        return attended.bfloat16()


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


def _rotary(config: GPTConfig) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the angle of each place and pair: (context, features / 2)."""
    features = config.width // config.heads
    # In float64: a cosine depends on the digits of an angle within one turn, of which float32 has
    # few left for a large angle.
    rates = ROTARY_BASE ** (-torch.arange(0, features, 2, dtype=torch.float64) / features)
    angles = torch.outer(torch.arange(config.context, dtype=torch.float64), rates)
    return angles.cos().float(), angles.sin().float()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of features, one of each half, by the angle of its place."""
    # Within autocast, x has half precision. The product with float32 would be float32, and queries
    # would then have another dtype than values, which the attention refuses.
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos + second * sin, second * cos - first * sin], -1)


def next_token_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next tokens, in nats.

    Args:
        scores: Scores of shape (batch, length, vocabulary).
        targets: The next tokens, shape (batch, length), int64.

    Returns:
        The loss, computed in float32 if the scores have fewer bits, without dimensions.
    """
    scores = scores.flatten(0, 1)
    # A sum over a whole vocabulary has two or three digits in half precision.
    if scores.dtype in (torch.bfloat16, torch.float16):
        scores = scores.float()
    return F.cross_entropy(scores, targets.flatten())
