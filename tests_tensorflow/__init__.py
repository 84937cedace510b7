"""Tests of the TensorFlow modules, which `make test-tensorflow` runs in an environment of their
own."""
