"""Read the TOML file that describes a sweep, and make its list of runs.

Every point of a sweep is one run: an algorithm, a number of workers, a network and a seed. One
worker has no network, so its runs belong to every network. The order is seed by seed, so that an
unfinished sweep is a whole picture with fewer seeds.
"""

from __future__ import annotations

import difflib
import hashlib
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlbench_core.client.series import FIRST_SEED, RunSeries, check_backend
from mlbench_core.comparison.prices import Pricing, load_prices
from mlbench_core.errors import ConfigurationError
from mlbench_core.files import read_text
from mlbench_core.network.description import MAX_HOSTS, Network
from mlbench_core.network.named import get_network
from mlbench_core.tasks import BACKENDS, Task, get_task, option_value

__all__ = [
    "FILES",
    "LONGEST_NAME",
    "Point",
    "Sweep",
    "Variant",
    "copied_name",
    "load_sweep",
    "parse_sweep",
]

FILES = "sweep-files"
"""The folder next to the copy of a sweep's file that has copies of the files that it names."""

LONGEST_NAME = 63
"""Most characters of the name of a run, which is a DNS label."""

_MOST_SEEDS = 1000
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|h)")
_KEYS = (
    *(
        "title",
        "task",
        "command",
        "backend",
        "arguments",
        "light",
        "workers",
        "networks",
        "seeds",
        "limit",
        "budget",
    ),
    *("algorithms", "variants", "price", "repeat_stopped"),
)
# Options of the script that the sweep gives itself.
_OWN_OPTIONS = ("--seed", "--light", "--backend", "--run_id")


@dataclass(frozen=True)
class Variant:
    """An algorithm of a sweep: its name, and the arguments of the script that choose it."""

    name: str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Point:
    """One run of a sweep.

    Attributes:
        name: Name of the run and of its result folder.
        algorithm: Name of the algorithm or variant.
        workers: Number of workers.
        network: The network as the file names it; None for one worker.
        seed: The seed.
        request: The body of ``POST /api/runs/``.
    """

    name: str
    algorithm: str
    workers: int
    network: str | None
    seed: int
    request: Mapping[str, Any] = field(compare=False, repr=False)

    @property
    def cell(self) -> tuple[str, int, str | None]:
        """Return what the runs of all seeds have in common: algorithm, number of workers and network."""
        return self.algorithm, self.workers, self.network


@dataclass(frozen=True)
class Sweep:
    """A sweep, as its file describes it.

    Attributes:
        title: Title of the figures.
        variants: The algorithms.
        workers: The numbers of workers, in the order of the file.
        networks: The networks by the names of the file.
        seeds: Number of seeds: 42, 43 and so on.
        task: The task, or None for a command of the user.
        command: The command of the user, or None for a task.
        backend: Communication backend.
        arguments: Arguments of every run.
        light: True to stop at the light goal.
        limit_s: Seconds of training after which a run ends without its goal; None for no limit.
        budget_s: Seconds after which no run starts; None for no budget.
        repeat_stopped: False if a run that was stopped at the limit with the first seed is not
            repeated with others.
        price: Price of the machines.
        files: The files that it names, by their names in it.
    """

    title: str
    variants: tuple[Variant, ...]
    workers: tuple[int, ...]
    networks: Mapping[str, Network]
    seeds: int = 1
    task: Task | None = None
    command: str | None = None
    backend: str = BACKENDS[0]
    arguments: tuple[str, ...] = ()
    light: bool = False
    limit_s: float | None = None
    budget_s: float | None = None
    repeat_stopped: bool = True
    price: Pricing = field(default_factory=Pricing)
    files: Mapping[str, Path] = field(default_factory=dict, compare=False)

    def points(self) -> list[Point]:
        """Return all runs in their order: the first seed of all, then the second, and so on.

        Raises:
            ConfigurationError: Two runs would have the same name, or the seeds cannot be used.
        """
        points = [
            self._point(variant, workers, network, seed)
            for seed in range(FIRST_SEED, FIRST_SEED + self.seeds)
            for workers in self.workers
            for network in (self.networks if workers > 1 else (None,))
            for variant in self.variants
        ]
        taken: dict[str, Point] = {}
        for point in points:
            other = taken.setdefault(point.name, point)
            if other is not point:
                pairs = (
                    (point.algorithm, other.algorithm),
                    (str(point.network), str(other.network)),
                )
                first, second = next((pair for pair in pairs if pair[0] != pair[1]), pairs[0])
                raise ConfigurationError(
                    "the names of algorithms and networks must differ in letters and digits, "
                    f"not {first!r} and "
                    f"{second!r}: both runs would be {point.name!r}, so rename one"
                )
        return points

    def _point(self, variant: Variant, workers: int, network: str | None, seed: int) -> Point:
        parts = [
            _slug(variant.name),
            str(workers),
            *([_slug(network)] if network else []),
            f"s{seed}",
        ]
        name = "-".join(part for part in parts if part)
        if len(name) > LONGEST_NAME:
            name = f"{name[: LONGEST_NAME - 9].rstrip('-')}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
        # Runs at the same time would slow down each other.
        request: dict[str, Any] = {
            "backend": self.backend,
            "light_target": self.light,
            "exclusive": True,
        }
        if network is not None:
            request["network"] = str(self.networks[network])
        words = [*self.arguments, *variant.arguments]
        if self.task is not None:
            request.update(task=self.task.key, arguments=words)
        else:
            request["command"] = shlex.join([*shlex.split(self.command or ""), *words])
        series = RunSeries(name, (workers,), request, self.task, seed=seed)
        try:
            series.check_seeds()
        except ValueError as error:
            raise ConfigurationError(str(error)) from None
        return Point(
            name, variant.name, workers, network, seed, {**series.requests()[0], "name": name}
        )


def load_sweep(path: Path) -> Sweep:
    """Read a sweep from its TOML file.

    Args:
        path: The file. Names of other files in it are relative to its folder.

    Raises:
        ConfigurationError: The file cannot be read, or a key is unknown or has a wrong value.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        text = read_text(path)
        return parse_sweep(tomllib.loads(text), path.parent, path.stem)
    except OSError as error:
        raise ConfigurationError(
            f"cannot read the sweep {path}: {error.strerror or error}"
        ) from error
    # Nested brackets raise RecursionError, and a number of hundreds of digits OverflowError.
    except (ValueError, RecursionError, OverflowError, ConfigurationError) as error:
        raise ConfigurationError(f"the sweep {path} cannot be used: {error}") from error


def parse_sweep(content: Mapping[str, Any], folder: Path = Path(), title: str = "Sweep") -> Sweep:
    """Return the sweep that the content of a TOML file describes.

    Args:
        content: The tables of the file.
        folder: The folder to which names of files are relative. A copy of a file in :data:`FILES`
            there comes first.
        title: The title without the key ``title``.

    Raises:
        ValueError: A key is unknown or missing, or has a wrong value.

    Example:
        >>> sweep = parse_sweep({"task": "1a", "workers": [1], "algorithms": ["power_sgd"]})
        >>> [point.name for point in sweep.points()]
        ['power-sgd-1-s42']
    """
    for key in content:
        if key not in _KEYS:
            similar = difflib.get_close_matches(key, _KEYS, 1)
            hint = (
                f"did you mean {similar[0]!r}?" if similar else f"the keys are {', '.join(_KEYS)}"
            )
            raise ValueError(f"key {key!r} must be one that a sweep has: {hint}")
    if ("task" in content) == ("command" in content):
        raise ValueError(
            'task or command must be given, and not both: write for example task = "1a"'
        )
    task = get_task(_text(content, "task")) if "task" in content else None
    command = _command(_text(content, "command"), folder) if "command" in content else None
    backend = (
        _text(content, "backend")
        if "backend" in content
        else (task.backends if task else BACKENDS)[0]
    )
    check_backend(backend, task, gpu=False)
    arguments = _words(content.get("arguments", []), "arguments")
    for option in _OWN_OPTIONS:
        if option in arguments or option_value(arguments, option) is not None:
            raise ValueError(f"arguments must not have {option}: the sweep gives it to each run")
    workers = _workers(content.get("workers"))
    seeds = content.get("seeds", 1)
    if not _is_count(seeds) or seeds > _MOST_SEEDS:
        raise ValueError(
            f"seeds must be a whole number from 1 to {_MOST_SEEDS}, not {seeds!r}: give the repeats"
        )
    limit_s, repeat_stopped = (
        _seconds(content, "limit"),
        _switch(content, "repeat_stopped", default=True),
    )
    if limit_s is None and not repeat_stopped:
        raise ValueError(
            'limit must be given with repeat_stopped = false: write for example limit = "2min"'
        )
    files: dict[str, Path] = {}
    return Sweep(
        title=_text(content, "title") if "title" in content else title,
        variants=_variants(content, task),
        workers=workers,
        networks=_networks(content.get("networks", []), workers, folder, files),
        seeds=seeds,
        task=task,
        command=command,
        backend=backend,
        arguments=arguments,
        light=_switch(content, "light", default=False),
        limit_s=limit_s,
        budget_s=_seconds(content, "budget"),
        repeat_stopped=repeat_stopped,
        price=_pricing(content["price"], folder, files) if "price" in content else Pricing(),
        files=files,
    )


def copied_name(name: str) -> str:
    """Return the name in :data:`FILES` of the copy of a file: two files of one name in different folders have two."""
    return f"{hashlib.sha256(name.encode()).hexdigest()[:8]}-{Path(name).name}"


def _add_file(name: str, folder: Path, files: dict[str, Path]) -> Path:
    """Add a file that a sweep names to ``files``, and return its path."""
    copy = folder / FILES / copied_name(name)
    return files.setdefault(name, copy if copy.is_file() else folder / name)


def _pricing(price: Any, folder: Path, files: dict[str, Path]) -> Pricing:
    if not isinstance(price, Mapping):
        raise ValueError(
            f'price must be a table, not {price!r}: write [price], then machine = "aws-c5.xlarge"'
        )
    if unknown := set(price) - {"machine", "spot", "prices"}:
        raise ValueError(
            f"price must have the keys machine, spot and prices only, not {min(unknown)!r}: "
            "remove it"
        )
    spot = price.get("spot", False)
    if not isinstance(spot, bool):
        raise ValueError(f"spot of price must be true or false, not {spot!r}: remove the quotes")
    machines = load_prices(
        _add_file(_text(price, "prices"), folder, files) if "prices" in price else None
    )
    name = price.get("machine")
    if name not in machines:
        raise ValueError(f"machine of price must be one of {', '.join(machines)}, not {name!r}")
    return Pricing(machines[name], spot)


def _command(text: str, folder: Path) -> str:
    """Return a command with the full path of its script, because workers run in other folders."""
    words = shlex.split(text)
    for position, word in enumerate(words[:2]):
        if word.endswith(".py") and (folder / word).is_file():
            words[position] = str((folder / word).absolute())
    return shlex.join(words)


def _variants(content: Mapping[str, Any], task: Task | None) -> tuple[Variant, ...]:
    variants = []
    for name in _words(content.get("algorithms", []), "algorithms"):
        if task is not None and name not in task.optimizers:
            similar = difflib.get_close_matches(name, task.optimizers, 1)
            hint = (
                f"did you mean {similar[0]!r}?"
                if similar
                else f"they are {', '.join(task.optimizers)}"
            )
            raise ValueError(
                f"algorithms must be values of --optimizer of task {task.key}, not {name!r}: {hint}"
            )
        variants.append(Variant(name, ("--optimizer", name)))
    tables = content.get("variants", [])
    if not isinstance(tables, list) or not all(isinstance(table, Mapping) for table in tables):
        raise ValueError(
            "variants must be tables: write [[variants]], then name = ... and arguments = [...]"
        )
    for table in tables:
        if set(table) != {"name", "arguments"}:
            raise ValueError(
                "a table of variants must have name and arguments, not "
                f"{', '.join(table) or 'nothing'}"
            )
        variants.append(Variant(_text(table, "name"), _words(table["arguments"], "arguments")))
    if not variants:
        raise ValueError(
            'algorithms must be given: write for example algorithms = ["centralized_sgd"]'
        )
    names = [variant.name for variant in variants]
    for variant in variants:
        if names.count(variant.name) > 1:
            raise ValueError(
                f"algorithms and variants must have different names, not {variant.name!r} twice"
            )
        if not _slug(variant.name):
            raise ValueError(
                f"name of a variant must have a letter or a digit, not {variant.name!r}"
            )
        for option in _OWN_OPTIONS:
            if option in variant.arguments or option_value(variant.arguments, option) is not None:
                raise ValueError(
                    f"arguments of {variant.name!r} must not have {option}: the sweep gives it"
                )
    return tuple(variants)


def _networks(
    value: Any, workers: Sequence[int], folder: Path, files: dict[str, Path]
) -> dict[str, Network]:
    names = _words(value, "networks")
    networks: dict[str, Network] = {}
    for name in names:
        if name in networks:
            raise ValueError(f"networks must differ, not {name!r} twice: remove one")
        networks[name] = get_network(
            str(_add_file(name, folder, files)) if name.endswith(".toml") else name
        )
        for number in workers:
            if number > 1:
                networks[name].check_hosts(number)
    if not networks and max(workers) > 1:
        raise ValueError(
            'networks must be given for several workers: write for example networks = ["lan-1g"]'
        )
    return networks


def _workers(value: Any) -> tuple[int, ...]:
    numbers = value if isinstance(value, list) else [value]
    if not numbers or not all(_is_count(number) and number <= MAX_HOSTS for number in numbers):
        raise ValueError(
            f"workers must be whole numbers from 1 to {MAX_HOSTS}, not {value!r}: write [1, 2, 4]"
        )
    return tuple(dict.fromkeys(numbers))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _switch(content: Mapping[str, Any], key: str, *, default: bool) -> bool:
    value = content.get(key, default)
    if not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false, not {value!r}: remove the quotes")
    return value


def _text(content: Mapping[str, Any], key: str) -> str:
    value = content[key]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{key} must be a text, not {value!r}: write it in quotes")
    return value


def _words(value: Any, key: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(word, str) and word for word in value):
        raise ValueError(
            f'{key} must be a list of texts, not {value!r}: write for example ["--dataset", '
            '"digits"]'
        )
    return tuple(value)


def _seconds(content: Mapping[str, Any], key: str) -> float | None:
    if key not in content:
        return None
    match = _TIME.fullmatch(content[key].strip()) if isinstance(content[key], str) else None
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not seconds:
        raise ValueError(
            f'{key} must be a time such as "90s", "2min" or "3h", not {content[key]!r}: give '
            "number and unit"
        )
    return seconds


def _slug(text: str) -> str:
    """Return the letters and digits of a text, with hyphens between them."""
    stem = (
        text.removesuffix(".toml").replace("\\", "/").rpartition("/")[2]
        if text.endswith(".toml")
        else text
    )
    return re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
