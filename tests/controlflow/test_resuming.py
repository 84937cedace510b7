"""Resumed runs of several workers: what each remembers for itself, and other numbers of workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.controlflow import checkpoint_workers as workers
from tests.helpers.ranks import run_ranks
from tests.helpers.thorough import some


def test_best_checkpoints_resume_to_the_bit(tmp_path: Path) -> None:
    for result in run_ranks(2, workers.resume_from_best, str(tmp_path)):
        assert result == dict.fromkeys([*workers.OPTIMIZERS, "alone"], (True, []))


@pytest.mark.parametrize(("saved_by", "loaded_by"), some([(2, 3), (2, 1), (1, 2), (2, 2)], 2))
def test_weights_stand_still_with_another_number_of_workers(
    tmp_path: Path, saved_by: int, loaded_by: int
) -> None:
    """They do as well with as many, if only rank 0's file of the best epoch is left."""
    run_ranks(saved_by, workers.save_all, str(tmp_path))
    if saved_by == loaded_by:
        for part in (*tmp_path.glob("*/model_best.*of*"), *tmp_path.glob("*-ALL/1_*")):
            part.unlink()
    for result in run_ranks(loaded_by, workers.stand_still, str(tmp_path)):
        drifting = {
            case: found
            for case, found in result.items()
            if found["moved"] > 1e-5 or found["apart"] > 2
        }
        assert not drifting
        for (name, freq), found in result.items():
            is_own = name in workers.REMEMBERING
            remembers = is_own and not (saved_by == 1 and name.startswith(("choco", "local")))
            assert len(found["warnings"]) == remembers, (name, freq, found)


def test_choco_starts_afresh_where_states_do_not_belong_together() -> None:
    for result in run_ranks(3, workers.other_graph):
        assert result["line"]["agreed"] == ((0, 1), (1, 2))
        for case, found in result.items():
            assert found["moved"] < 1e-5, (case, found)
            assert found["apart"][1] <= found["apart"][0] / 10, (case, found)
            assert len(found["warnings"]) == (case != "fits"), (case, found)
