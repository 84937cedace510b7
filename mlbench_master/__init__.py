"""The master keeps runs and their metrics, starts and stops runs, and shows them.

Importing this package loads neither FastAPI nor SQLAlchemy nor torch. :func:`create_app` loads them
on first use (:pep:`562`)::

    mlbench master --port 5080                           # as a server
    mlbench_master.create_app(database_url="sqlite://")  # as an ASGI application, for a test

The path of a request: ``access`` (authentication) -> ``routes`` (HTTP) -> ``schemas``
(validation) -> ``store`` (the database) and ``scheduler`` (the order of runs) -> ``engines``
(processes).
"""

from __future__ import annotations

from typing import Any

__all__ = ["create_app"]


def __getattr__(name: str) -> Any:
    if name == "create_app":
        from mlbench_master.app import create_app

        return create_app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
