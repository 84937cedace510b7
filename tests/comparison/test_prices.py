"""The price of a run comes from an editable table, whose mistakes are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlbench_core.comparison.prices import Machine, Pricing, load_prices, price_index, price_of
from mlbench_core.errors import ConfigurationError

ROW = """
[[machine]]
name = "mine"
provider = "own"
cpu = "A"
cores = 2
memory_gib = 7.5
"""
PRICE = (
    'price_per_hour = 3\nspot_per_hour = 0.6\ncurrency = "EUR"\ndate = 2026-11-01\nsource '
    '= "https://example.org"\n'
)
MINE = Machine("mine", "own", "A", 2, 7.5)


def write(folder: Path, text: str) -> Path:
    path = folder / "prices.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_table_of_ones_own_is_read(tmp_path: Path) -> None:
    found = load_prices(
        write(tmp_path, ROW + PRICE + ROW.replace("mine", "other") + 'gpu = "G"\ngpus = 2\n')
    )
    assert list(found) == ["mine", "other"]
    mine, other = found.values()
    assert mine == Machine(
        *("mine", "own", "A", 2, 7.5),
        price_per_hour=3,
        spot_per_hour=0.6,
        currency="EUR",
        date="2026-11-01",
        source="https://example.org",
    )
    assert (other.gpu, other.gpus, other.price_per_hour) == ("G", 2, None)


def test_every_row_that_ships_says_where_its_price_comes_from() -> None:
    machines = load_prices().values()
    with_price = [machine for machine in machines if machine.price_per_hour is not None]
    assert len(with_price) >= 5
    assert all(
        machine.source.startswith("https://") and machine.date >= "2024" for machine in with_price
    )
    # Without a price, there is still a price index.
    unknown = [machine.name for machine in machines if machine.price_per_hour is None]
    assert unknown == ["gcp-n1-standard-4-t4", "epyc-2"]


def test_the_price_is_that_of_a_machine_for_each_worker(tmp_path: Path) -> None:
    mine = load_prices(write(tmp_path, ROW + PRICE))["mine"]
    assert price_of(1200, 3, mine) == pytest.approx(3)
    assert price_of(1200, 3, mine, spot=True) == pytest.approx(0.6)
    assert price_of(0, 3, mine) == 0
    assert price_of(1200, 3, MINE) is None
    assert price_of(1200, 3, MINE, spot=True) is None


@pytest.mark.parametrize(("spot", "field"), [(False, "price_per_hour"), (True, "spot_per_hour")])
def test_an_unknown_price_says_how_to_give_one(spot: bool, field: str) -> None:
    (remark,) = Pricing(load_prices()["gcp-n1-standard-4-t4"], spot).remarks
    assert "price of gcp-n1-standard-4-t4 is not known" in remark
    assert f"give {field} with currency, date and source in a copy of the table" in remark
    assert remark.endswith("the path of the copy to --prices.")


def test_the_price_index_is_price_increase_by_speed_up() -> None:
    assert price_index(100, 1, base_train_s=100) == 1
    # Ideal scaling: the price stays, and the speed-up is 4.
    assert price_index(25, 4, base_train_s=100) == pytest.approx(1 / 4)
    # No speed-up at twice the price.
    assert price_index(100, 4, base_train_s=100, base_workers=2) == pytest.approx(2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[machine", "cannot be read: "),
        ("", r"must have tables \[\[machine\]\] and nothing else"),
        ("[machine]\nname = 'x'", "must have tables"),
        ("machine = []", "must have tables"),
        (ROW + "[[machines]]", "must have tables"),
        ("machine = [3]", "machine 1 must be a table with the fields of a machine, not 3"),
        (ROW + ROW, r"machine 2 \(mine\): name must be unique"),
        (
            ROW + "price = 3",
            r"machine 1 \(mine\): a field must be one of .*price_per_hour.*, not 'price'",
        ),
        (
            ROW.replace("cores = 2", ""),
            r"machine 1 \(mine\): cores must be given, and is missing or empty",
        ),
        (ROW.replace('"mine"', '""'), "machine 1: name must be given"),
        (
            ROW.replace('"mine"', "3"),
            r"machine 1 \(3\): name must be a text, not 3: put it in quotes",
        ),
        (
            ROW.replace("cores = 2", "cores = 2.5"),
            r"machine 1 \(mine\): cores must be an integer, not 2.5",
        ),
        (
            ROW.replace("7.5", "nan"),
            r"machine 1 \(mine\): memory_gib must be finite and positive, not nan",
        ),
        (
            ROW + 'price_per_hour = "3"',
            r"machine 1 \(mine\): price_per_hour must be a number, not '3'",
        ),
        (
            ROW + "spot_per_hour = -1",
            r"machine 1 \(mine\): spot_per_hour must be finite and at least 0, not -1",
        ),
        (
            ROW + PRICE.replace('currency = "EUR"', ""),
            r"machine 1 \(mine\): currency must be given with a price",
        ),
        (
            ROW + PRICE.replace("date", "# date"),
            r"machine 1 \(mine\): date must be given with a price",
        ),
    ],
)
def test_a_mistake_in_the_table_is_named_with_its_row(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        load_prices(write(tmp_path, text))
    assert "prices.toml" in str(caught.value)


def test_a_missing_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"the table of prices .*absent\.toml cannot be read"
    ):
        load_prices(tmp_path / "absent.toml")


@pytest.mark.parametrize(
    ("seconds", "workers", "message"),
    [(-1, 1, "train_s"), (float("nan"), 1, "train_s"), (1, 0, "workers")],
)
def test_wrong_numbers_are_named(seconds: float, workers: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message} must be"):
        price_of(seconds, workers, MINE)
    with pytest.raises(ValueError, match=r"^base_train_s must be finite and positive"):
        price_index(1, 1, base_train_s=0)
