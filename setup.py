"""Build script: everything but the CUDA extension's commands is in pyproject.toml."""

from setuptools import setup

setup()
