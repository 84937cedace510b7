"""The figures of the pages about measured time and communication are those that their script draws."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import draw_timelines
import pytest

from mlbench_core.tracking.tracker import Tracker


@pytest.mark.parametrize("file", draw_timelines.FIGURES)
def test_the_committed_figure_is_current(file: str) -> None:
    figure = draw_timelines.FIGURES[file]()
    assert (draw_timelines.FOLDER / file).read_text() == figure, "run: python tools/draw_timelines.py"
    ElementTree.fromstring(figure)


def test_the_figure_of_a_batch_has_the_steps_of_the_tracker_with_the_colors_of_their_phases() -> None:
    figure = draw_timelines.draw_measuring_time()
    steps = {
        text: color for color, text in re.findall(r'fill="(#\w+)" stroke=[^>]*/>\n<text[^>]*>(\w+)</text>', figure)
    }
    tracker = Tracker([], "1", 0)
    for phase, color in (
        (tracker.compute_steps, draw_timelines.COMPUTE),
        (tracker.communication_steps, draw_timelines.COMMUNICATION),
        (tracker.metrics_steps, draw_timelines.METRICS),
        (tracker.preprocess_steps, draw_timelines.DATA),
    ):
        assert [steps[name] for name in phase] == [color] * len(phase)
    assert steps["init"] == draw_timelines.OUTSIDE
