"""The import path of version 3.0 for the decoder of GNMT, with the arguments of this version."""

from mlbench_core.models.pytorch.gnmt.modules import Decoder as ResidualRecurrentDecoder

__all__ = ["ResidualRecurrentDecoder"]
