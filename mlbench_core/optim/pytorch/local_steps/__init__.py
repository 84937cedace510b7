"""Optimizers whose workers train alone for several steps before they average."""
