"""Methods that take the place of an observed script's own exchange or optimizer."""
