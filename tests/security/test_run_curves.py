"""The curves of a run's page in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.master.helpers import server, wait_for
from tests.security.browser import Browser, chromium

# The page's own charts, for what cannot be read from a canvas.
KEEP_PLOTS = """
window.plots = [];
const Plot = window.uPlot;
window.uPlot = class extends Plot {
    constructor(...given) { const made = super(...given); window.plots.push(made); }
};
"""


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with chromium(tmp_path / "profile") as opened:
        yield opened


def test_curves_appear_and_grow_and_the_choices_stay(tmp_path: Path, browser: Browser) -> None:
    with server(tmp_path / "data", "--no-token") as (base, _):
        body = {"name": "a", "num_workers": 2, "command": "sleep 100"}
        run = httpx.post(f"{base}/api/runs/", json=body).json()["id"]

        def send(epoch: int, **values: Any) -> None:
            items = [
                {
                    "run_id": run,
                    "name": f"{name} @ {rank}",
                    "value": value,
                    "metadata": {"rank": rank, "epoch": epoch},
                }
                for name, value in values.items()
                for rank in ((0, 1) if name.startswith("train") else (0,))
            ]
            assert httpx.post(f"{base}/api/metrics/", json=items).is_success

        page = browser.open(f"{base}/runs/{run}/?against=step")
        # The scripts run after the page is there, those of the page last.
        wait_for(
            lambda: page("!!window.uPlot && document.readyState === 'complete'"), what="the page"
        )
        assert "No metrics yet" in page.text("#no-curves")
        page(KEEP_PLOTS)
        for epoch in range(3):
            send(epoch, train_loss=4.0 - epoch, val_global_loss=5.0 - epoch, lr=0.5)
        wait_for(
            lambda: page.text("#charts figure p") == "train 2, validation 3", what="the first chart"
        )
        assert page("[...document.querySelectorAll('#charts h3')].map((h) => h.textContent)") == [
            "Loss",
            "Learning rate",
        ]
        assert page.text("#no-curves") == ""
        # The same chart gets the new points, and keeps the part that a user looks at.
        page("window.kept = document.querySelector('#charts canvas')")
        page("window.kept_plot = plots.find((plot) => plot.ctx.canvas === window.kept)")
        page("kept_plot.setScale('x', { min: 0.5, max: 1.5 })")
        send(3, train_loss=1.0, val_global_loss=2.0)
        wait_for(
            lambda: page.text("#charts figure p") == "train 1, validation 2", what="the new points"
        )
        assert page("kept.isConnected && [kept_plot.scales.x.min, kept_plot.scales.x.max]") == [
            0.5,
            1.5,
        ]
        assert page("kept_plot.data") == [[0, 1, 2, 3], [4, 3, 2, 1], [5, 4, 3, 2]]
        # Another axis, all workers, and another metric: all of them are in the address.
        choose = (
            "const s = document.getElementById('{}'); s.value = '{}'; s.dispatchEvent(new "
            "Event('change'))"
        )
        for name, value in (("against", "epoch"), ("ranks", "all")):
            page("{" + choose.format(name, value) + "}")
        page(
            "document.getElementById('name').value = 'lr'; "
            "document.getElementById('add').requestSubmit()"
        )
        wait_for(
            lambda: page("document.querySelectorAll('#charts figure').length") == 3,
            what="the third chart",
        )
        assert page("location.search") == "?against=epoch&ranks=all&chart=lr"
        again = browser.open(page("location.href"))
        wait_for(
            lambda: again("document.querySelectorAll('#charts canvas').length") == 3,
            what="the same page",
        )
        assert (
            again.text("#charts figure p") == "train, worker 0 1, train, worker 1 1, validation 2"
        )
        assert (
            again("document.querySelector('#charts canvas').getAttribute('aria-label')")
            == "Loss against epoch"
        )
        again("document.querySelector('#charts figure button').click()")
        wait_for(lambda: again("location.search") == "?against=epoch&ranks=all", what="the removal")
        wait_for(
            lambda: again("document.querySelectorAll('#charts figure').length") == 2,
            what="the removal",
        )
        # A metric that does not exist is no obstacle for the charts after it.
        wrong = browser.open(f"{base}/runs/{run}/?chart=mistyped&chart=lr")
        wait_for(
            lambda: wrong("document.querySelectorAll('#charts figure').length") == 4,
            what="all charts",
        )
        assert wrong("[...document.querySelectorAll('#charts figure')].map((f) => "
                     "!!f.querySelector('canvas'))") == [
            True, True, False, True
        ]  # fmt: skip
        assert wrong("document.getElementById('curves-problem').hidden")
