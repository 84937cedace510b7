"""Tests of the ``mlbench`` command."""
