"""Compute the price of a run from an editable table of machine prices.

The table that ships with MLBench is ``prices.toml`` beside this module. Prices change: copy the
file, correct it, and give its path.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mlbench_core.arguments import check_finite_at_least_0, check_int, check_positive
from mlbench_core.errors import ConfigurationError
from mlbench_core.files import read_text

__all__ = ["Machine", "Pricing", "load_prices", "price_index", "price_of"]

_TABLE = Path(__file__).with_name("prices.toml")
_SECONDS_PER_HOUR = 3600
_TEXTS = ("name", "provider", "cpu", "gpu", "currency", "date", "source")


@dataclass(frozen=True)
class Machine:
    """One row of the table of prices.

    Attributes:
        name: Name to ask for, unique in the table.
        provider: Company that rents the machine out, and the region.
        cpu: The processor.
        cores: Number of (virtual) cores.
        memory_gib: Memory in GiB.
        gpu: The GPU, or empty.
        gpus: Number of GPUs.
        price_per_hour: Regular price of the whole machine for an hour, or None if it is not known.
        spot_per_hour: Price for an hour if the provider may interrupt the machine, or None if it is
            not known.
        currency: Currency of both prices, for example ``"USD"``.
        date: Day of the prices, as ``2024-06-01``.
        source: Address of the page that publishes them.

    Raises:
        TypeError: A field has the wrong type.
        ValueError: A number is not allowed, or a row with a price lacks the currency, the date or
            the source.
    """

    name: str
    provider: str
    cpu: str
    cores: int
    memory_gib: float
    gpu: str = ""
    gpus: int = 0
    price_per_hour: float | None = None
    spot_per_hour: float | None = None
    currency: str = ""
    date: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        for field in _TEXTS:
            if not isinstance(getattr(self, field), str):
                raise TypeError(
                    f"{field} must be a text, not {getattr(self, field)!r}: put it in quotes"
                )
        check_int("cores", self.cores)
        check_positive("memory_gib", self.memory_gib)
        check_int("gpus", self.gpus, 0)
        has_price = False
        for field in ("price_per_hour", "spot_per_hour"):
            if getattr(self, field) is not None:
                check_finite_at_least_0(field, getattr(self, field))
                has_price = True
        for field in ("currency", "date", "source"):
            if has_price and not getattr(self, field):
                raise ValueError(
                    f"{field} must be given with a price: a price without it cannot be checked"
                )


@dataclass(frozen=True)
class Pricing:
    """The machine on which each worker runs, and the price to use.

    Attributes:
        machine: The machine; None if prices are unknown.
        spot: True for the price of interruptible machines.
    """

    machine: Machine | None = None
    spot: bool = False

    @property
    def per_hour(self) -> float | None:
        """Return the price of one worker for an hour, or None if it is unknown."""
        return self.price(3600.0, 1)

    def price(self, train_s: float, workers: int) -> float | None:
        """Return the price of a run, or None if it is unknown."""
        if self.machine is None:
            return None
        return price_of(train_s, workers, self.machine, self.spot)

    @property
    def remarks(self) -> list[str]:
        """Return a sentence on the price as a list; an empty list without a machine."""
        if self.machine is None:
            return []
        name = self.machine.name
        kind, field = "regular", "price_per_hour"
        if self.spot:
            kind, field = "spot", "spot_per_hour"
        if self.per_hour is None:
            remark = (
                f"Price: the {kind} price of {name} is not known: give {field} with currency, date "
                "and source in a copy of the table, and the path of the copy to --prices."
            )
        else:
            # A result with prices names the price of an hour and its date.
            price = f"{self.per_hour:g} {self.machine.currency} an hour"
            remark = f"Price: one {name} for each worker, {kind}, {price} on {self.machine.date}."
        return [remark]


def load_prices(path: Path | None = None) -> dict[str, Machine]:
    """Read a table of machine prices.

    Args:
        path: TOML file with one table ``[[machine]]`` per machine, with the fields of
            :class:`Machine`; by default, the table that ships with MLBench.

    Returns:
        The machines by name, in the order of the file.

    Raises:
        ConfigurationError: The file cannot be read or is not TOML, or a row is wrong; the message
            names the row.

    Example:
        >>> load_prices()["gcp-n1-standard-4"].cores
        4
    """
    path = path or _TABLE
    content = _read_toml(path)
    rows = content.get("machine")
    if not isinstance(rows, list) or not rows or set(content) != {"machine"}:
        raise ConfigurationError(
            f"{path} must have tables [[machine]] and nothing else: see the table of MLBench"
        )
    machines: dict[str, Machine] = {}
    for number, row in enumerate(rows, 1):
        where = f"{path}, machine {number}"
        if isinstance(row, Mapping) and row.get("name"):
            where += f" ({row['name']})"
        machine = _read_machine(row, where)
        if machine.name in machines:
            raise ConfigurationError(
                f"{where}: name must be unique: give this machine another name"
            )
        machines[machine.name] = machine
    return machines


def price_of(train_s: float, workers: int, machine: Machine, spot: bool = False) -> float | None:
    """Return the price of a run if each worker has its own machine, which is paid by the second.

    Args:
        train_s: Seconds of training, for example the time to the goal.
        workers: Number of workers.
        machine: Kind of the machines.
        spot: If True, use the price of interruptible machines.

    Returns:
        The price in the currency of the machine, or None if its price is not known.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The time is negative or not finite, or the number of workers is below 1.

    Example:
        >>> round(price_of(1800, 4, load_prices()["gcp-n1-standard-4"]), 3)
        0.38
    """
    check_finite_at_least_0("train_s", train_s)
    check_int("workers", workers)
    per_hour = machine.price_per_hour
    if spot:
        per_hour = machine.spot_per_hour
    if per_hour is None:
        return None
    return train_s / _SECONDS_PER_HOUR * workers * per_hour


def price_index(train_s: float, workers: int, base_train_s: float, base_workers: int = 1) -> float:
    r"""Return how much more the price increases than the performance, compared with a base run.

    With :math:`k` workers that take the time :math:`T_k`, and :math:`k_0` workers of the base run,

    .. math::

        I_k = \frac{k T_k}{k_0 T_{k_0}} \Big/ \frac{T_{k_0}}{T_k}

    The price of an hour cancels out, so the index is known without any price. If it is below 1, the
    additional workers pay for themselves: the speed-up is larger than the increase in price.

    Args:
        train_s: Seconds of the run.
        workers: Its number of workers.
        base_train_s: Seconds of the base run, usually the run with the fewest workers.
        base_workers: Number of workers of the base run.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A time is not positive and finite, or a number of workers is below 1.

    Example:
        >>> price_index(25.0, 4, base_train_s=100.0)
        0.25
    """
    check_positive("train_s", train_s)
    check_positive("base_train_s", base_train_s)
    check_int("workers", workers)
    check_int("base_workers", base_workers)
    # k T_k / (k_0 T_k0) divided by T_k0 / T_k.
    return workers / base_workers * (train_s / base_train_s) ** 2


def _read_toml(path: Path) -> dict[str, Any]:
    # Imported here: only the commands that show prices need it.
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    try:
        return tomllib.loads(read_text(path))
    # Nested brackets raise RecursionError, and a number of hundreds of digits OverflowError.
    except (OSError, ValueError, RecursionError, OverflowError) as error:
        raise ConfigurationError(f"the table of prices {path} cannot be read: {error}") from error


def _read_machine(row: Any, where: str) -> Machine:
    """Return a row of the table as a machine.

    Args:
        row: The row.
        where: Its place, for messages.

    Raises:
        ConfigurationError: The row is not a valid machine.
    """
    if not isinstance(row, Mapping):
        raise ConfigurationError(
            f"{where} must be a table with the fields of a machine, not {row!r}"
        )
    allowed = set(map(operator.attrgetter("name"), fields(Machine)))
    unknown = sorted(set(row) - allowed)
    if unknown:
        raise ConfigurationError(
            f"{where}: a field must be one of {', '.join(sorted(allowed))}, not {unknown[0]!r}"
        )
    for name in ("name", "provider", "cpu", "cores", "memory_gib"):
        if not row.get(name):
            raise ConfigurationError(f"{where}: {name} must be given, and is missing or empty")
    values: dict[str, Any] = dict(row)
    if "date" in values:
        # A date without quotes is a date in TOML.
        values["date"] = str(values["date"])
    try:
        return Machine(**values)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigurationError(f"{where}: {error}") from error
