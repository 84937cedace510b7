"""Checks of arguments: what passes, and what the messages say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mlbench_core import arguments


def test_integers_pass_as_int() -> None:
    for value in (3, np.int64(3)):
        found = arguments.check_int("n", value)
        assert found == 3 and type(found) is int
    assert arguments.check_int("n", -2, least=-2) == -2


def test_numbers_pass() -> None:
    for value in (0, 0.5, np.float32(2)):
        arguments.check_number("n", value)
        arguments.check_finite_at_least_0("n", value)
    arguments.check_positive("n", 0.5)
    arguments.check_at_least("n", float("inf"), 1)


@pytest.mark.parametrize(
    ("check", "value", "error", "message"),
    [
        (arguments.check_int, 0, ValueError, "n must be at least 1, not 0"),
        (arguments.check_int, 2.0, TypeError, "n must be an integer, not 2.0"),
        (arguments.check_int, True, TypeError, "n must be an integer, not True"),
        (arguments.check_number, "1", TypeError, "n must be a number, not '1'"),
        (arguments.check_number, False, TypeError, "n must be a number, not False"),
        (
            arguments.check_finite_at_least_0,
            -0.5,
            ValueError,
            "n must be finite and at least 0, not -0.5",
        ),
        (
            arguments.check_finite_at_least_0,
            float("inf"),
            ValueError,
            "n must be finite and at least 0, not inf",
        ),
        (arguments.check_positive, 0, ValueError, "n must be finite and positive, not 0"),
        (
            arguments.check_positive,
            float("nan"),
            ValueError,
            "n must be finite and positive, not nan",
        ),
        (
            lambda name, value: arguments.check_at_least(name, value, 1),
            float("nan"),
            ValueError,
            "not nan",
        ),
        (
            lambda name, value: arguments.check_rank(0, value),
            0,
            ValueError,
            "world_size must be at least 1, not 0",
        ),
        (
            lambda name, value: arguments.check_rank(value, 2),
            -1,
            ValueError,
            "rank must be from 0 to 1, not -1: ranks count from 0 and world_size is 2",
        ),
    ],
)
def test_wrong_values_are_named(
    check: Callable[[str, Any], object], value: object, error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as raised:
        check("n", value)
    assert str(raised.value).endswith(message)
