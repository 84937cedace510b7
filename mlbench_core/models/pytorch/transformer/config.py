"""The dimensions of the Transformer."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from mlbench_core.arguments import check_at_least

__all__ = ["TransformerConfig"]


@dataclass(frozen=True)
class TransformerConfig:
    """The dimensions of a Transformer.

    It is the argument ``args`` of
    :class:`~mlbench_core.models.pytorch.transformer.transformer.TransformerModel`. The defaults are
    those of the big model of the paper. Any object with some of these attributes, such as an
    :class:`argparse.Namespace`, can be used instead. Missing attributes have their defaults, others
    are ignored.

    Args:
        encoder_embed_dim: Width of the encoder.
        encoder_ffn_embed_dim: Width inside its feed-forward networks.
        encoder_layers: Number of its layers.
        encoder_attention_heads: Heads of its attention.
        encoder_learned_pos: If True, positions are learned instead of sinusoidal.
        encoder_normalize_before: If True, layer norm comes before each block, and once at the end,
            instead of after each block.
        decoder_embed_dim: Width of the decoder; it must be that of the encoder.
        decoder_ffn_embed_dim: As for the encoder.
        decoder_layers: As for the encoder.
        decoder_attention_heads: As for the encoder.
        decoder_learned_pos: As for the encoder.
        decoder_normalize_before: As for the encoder.
        dropout: Dropout probability of embeddings and of each block's output.
        attention_dropout: Dropout probability of attention weights.
        relu_dropout: Dropout probability inside the feed-forward networks.
        share_all_embeddings: If True, one matrix embeds source and target and gives the output's
            scores. The vocabularies must then be the same.
        share_decoder_input_output_embed: If True, without the option above, one matrix embeds the
            target and gives the scores.
        max_source_positions: Length of the longest source, in tokens.
        max_target_positions: Length of the longest target, in tokens.
        left_pad_target: If True, targets are padded on the left. With the usual padding on the
            right, the decoder needs no padding mask, because a word never sees the positions after
            it.
        softmax_type: ``"default"`` or ``"fast_fill"`` (torch's fused kernels), see
            :class:`.MultiheadAttention`.
        attention_backend: ``"auto"``, ``"reference"``, ``"sdpa"`` or ``"kernel"``, see the same
            class.

    Raises:
        ValueError: A value is out of its bounds.

    References:
        Vaswani et al. 2017, arXiv 1706.03762, table 3.

    Example:
        >>> TransformerConfig.preset("small", dropout=0.3).dropout
        0.3
    """

    encoder_embed_dim: int = 1024
    encoder_ffn_embed_dim: int = 4096
    encoder_layers: int = 6
    encoder_attention_heads: int = 16
    encoder_learned_pos: bool = False
    encoder_normalize_before: bool = True
    decoder_embed_dim: int = 1024
    decoder_ffn_embed_dim: int = 4096
    decoder_layers: int = 6
    decoder_attention_heads: int = 16
    decoder_learned_pos: bool = False
    decoder_normalize_before: bool = True
    dropout: float = 0.1
    attention_dropout: float = 0.1
    relu_dropout: float = 0.1
    share_all_embeddings: bool = True
    share_decoder_input_output_embed: bool = False
    max_source_positions: int = 1024
    max_target_positions: int = 1024
    left_pad_target: bool = False
    softmax_type: str = "default"
    attention_backend: Literal["auto", "reference", "sdpa", "kernel"] = "auto"

    def __post_init__(self) -> None:
        for size in ("layers", "ffn_embed_dim"):
            for name in (f"encoder_{size}", f"decoder_{size}"):
                check_at_least(name, getattr(self, name), 1)
        if self.encoder_embed_dim != self.decoder_embed_dim:
            raise ValueError(
                "decoder_embed_dim must be encoder_embed_dim "
                f"({self.encoder_embed_dim}), not {self.decoder_embed_dim}"
            )
        # Below 1, because kept values are divided by 1 - p.
        for name in ("dropout", "attention_dropout", "relu_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(
                    f"{name} must be at least 0 and below 1, not {getattr(self, name)}"
                )

    @classmethod
    def preset(cls, name: str, **changes: Any) -> TransformerConfig:
        """Create the configuration of a model by name.

        Args:
            name: ``"big"`` and ``"base"`` are those of the paper with layer norm before each block.
                ``"small"`` (3 + 3 layers, 256 wide) is for small data sets such as Multi30k on a
                CPU.
            changes: Fields that differ from the preset.

        Raises:
            ValueError: The name is unknown.
            TypeError: A change is not a field.
        """
        if name not in _PRESETS:
            raise ValueError(f"preset must be one of {', '.join(_PRESETS)}, not {name!r}")
        return replace(_PRESETS[name], **changes)

    @classmethod
    def from_args(cls, args: object) -> TransformerConfig:
        """Read the fields that an object has as attributes, with defaults for the others."""
        if isinstance(args, cls):
            return args
        options = {}
        for field in fields(cls):
            if hasattr(args, field.name):
                options[field.name] = getattr(args, field.name)
        return cls(**options)


def _symmetric(
    width: int, hidden: int, layers: int, heads: int, dropout: float
) -> TransformerConfig:
    """Create a configuration with an encoder and a decoder of the same dimensions."""
    sizes = {
        "embed_dim": width,
        "ffn_embed_dim": hidden,
        "layers": layers,
        "attention_heads": heads,
    }
    options: dict[str, Any] = {"dropout": dropout}
    for name, size in sizes.items():
        options[f"encoder_{name}"] = options[f"decoder_{name}"] = size
    return TransformerConfig(**options)


_PRESETS = {
    "big": TransformerConfig(),
    "base": _symmetric(width=512, hidden=2048, layers=6, heads=8, dropout=0.1),
    # Dropout inside the blocks would take a fifth of the time on a CPU, and a training of few
    # epochs overfits little.
    "small": replace(
        _symmetric(width=256, hidden=1024, layers=3, heads=4, dropout=0.2),
        attention_dropout=0.0,
        relu_dropout=0.0,
    ),
}
