"""Replace the exchange or the optimizer of an observed script by a method."""
