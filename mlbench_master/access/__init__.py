"""Decide who may use the master: tokens, sessions of browsers, proofs of identity and proxies."""
