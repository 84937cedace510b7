"""The import path of version 3.0 for the encoder of GNMT, with the arguments of this version."""

from mlbench_core.models.pytorch.gnmt.modules import Encoder as ResidualRecurrentEncoder

__all__ = ["ResidualRecurrentEncoder"]
