"""Read the TOML file that describes a sweep, and make its list of runs.

Every point of a sweep is one run: an algorithm, a number of workers, a network and a seed. One
worker has no network, so its runs belong to every network. So do all runs of a sweep whose times
are modelled. The order is seed by seed, so that an
unfinished sweep is a whole picture with fewer seeds.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlbench_core.arguments import hint_for
from mlbench_core.calling_environment import observe_command
from mlbench_core.client.series import FIRST_SEED, RunSeries, check_backend
from mlbench_core.comparison.prices import Pricing, load_prices
from mlbench_core.errors import ConfigurationError
from mlbench_core.files import read_text
from mlbench_core.network.description import MAX_HOSTS, Network
from mlbench_core.network.named_networks import get_network
from mlbench_core.observe.methods.names import parse_method
from mlbench_core.observe.output import parse_goal, parse_metric
from mlbench_core.sweep.tuning_options import Trial, Tuning, parse_tuning
from mlbench_core.tasks import BACKENDS, Task, get_task, option_value

__all__ = [
    "FILES",
    "LONGEST_NAME",
    "Point",
    "Sweep",
    "Variant",
    "copied_name",
    "in_words_of_file",
    "load_sweep",
    "parse_sweep",
    "parse_time",
]

FILES = "sweep-files"
"""The folder next to the copy of a sweep's file that has copies of the files that it names."""

LONGEST_NAME = 63
"""Most characters of the name of a run, which is a DNS label."""

_MOST_SEEDS = 1000
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|h)")
_KEYS = (
    "title",
    "task",
    "command",
    "script",
    "methods",
    "metrics",
    "goal",
    "backend",
    "arguments",
    "light",
    "workers",
    "networks",
    "seeds",
    "time",
    "limit",
    "budget",
    "algorithms",
    "variants",
    "price",
    "repeat_stopped",
    "tuning",
)
# Words in errors of the observer's options, and those of a file.
_WORDS_OF_OPTIONS = (
    (r"^--method must", "methods must"),
    (r"^--method ", "methods: "),
    (r"write for example --method (\S+)$", r'write for example methods = ["\1"]'),
    (
        r"write ((?:--method \S+ )?--optimizer .+)$",
        r"a sweep keeps the script's optimizer, so use mlbench run with \1",
    ),
    (r"^--metric must be NAME=REGEX", "metrics must be {NAME = 'REGEX'}"),
    (r"^--metric ", "metrics: "),
    (r"--metric '([\w@.-]+)=([^']*)'", r"metrics = {\1 = '\2'}"),
    (r"^--goal must", "goal must"),
    (r"--goal '", "goal = '"),
)
# Keys that a script cannot have, and the remedy.
_NOT_OF_SCRIPT = {
    "algorithms": "write methods in its place",
    "variants": "write methods in its place",
    "light": "write a goal, for example goal = 'val_loss<=1.5'",
}
# Options of the script that the sweep gives itself.
_OWN_OPTIONS = ("--seed", "--light", "--backend", "--run_id")
_FIXED_TIME = "--goal-after"


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
        algorithm: Name of the algorithm, variant or method.
        workers: Number of workers.
        network: The network as the file names it; None for one worker, for a trial, and if
            times are modelled.
        seed: The seed.
        request: The body of ``POST /api/runs/``; empty if it depends on trials that have not ended.
        trial: The value that a trial of the tuning tries; None for a run of the results.
    """

    name: str
    algorithm: str
    workers: int
    network: str | None
    seed: int
    request: Mapping[str, Any] = field(compare=False, repr=False)
    trial: Trial | None = None

    @property
    def cell(self) -> tuple[str, int, str | None]:
        """Return algorithm, number of workers and network, which all seeds of a run share."""
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
        command: The command of the user, or None for a task or a script.
        script: The words of a script that is measured unchanged; none for a task or a command.
        observer: Options of the observer of a script, which are the same in every run.
        backend: Communication backend.
        arguments: Arguments of every run.
        light: True to stop at the light goal.
        is_modelled: True if the seconds on networks are modelled, see
            :mod:`mlbench_core.sweep.modelled`.
        limit_s: Seconds of training after which a run ends without its goal; None for no limit.
        budget_s: Seconds after which no run starts; None for no budget.
        repeat_stopped: False if a run that was stopped at the limit with the first seed is not
            repeated with others.
        price: Price of the machines.
        tuning: The parameters that are tuned before the runs; None to run with the arguments alone.
        files: The files that it names, by their names in it.
    """

    title: str
    variants: tuple[Variant, ...]
    workers: tuple[int, ...]
    networks: Mapping[str, Network]
    seeds: int = 1
    task: Task | None = None
    command: str | None = None
    script: tuple[str, ...] = ()
    observer: tuple[str, ...] = ()
    backend: str = BACKENDS[0]
    arguments: tuple[str, ...] = ()
    light: bool = False
    is_modelled: bool = False
    limit_s: float | None = None
    budget_s: float | None = None
    repeat_stopped: bool = True
    price: Pricing = field(default_factory=Pricing)
    tuning: Tuning | None = None
    files: Mapping[str, Path] = field(default_factory=dict, compare=False)

    def points(self, tuned: Mapping[tuple[str, int], Sequence[str]] | None = None) -> list[Point]:
        """Return all runs in their order: the first seed of all, then the second, and so on.

        The trials of the tuning are not among them.

        Args:
            tuned: The tuned arguments by algorithm and number of workers. With tuning, the requests
                of the others are empty.

        Raises:
            ConfigurationError: Two runs would have the same name, or the seeds cannot be used.
        """
        points = []
        seeds = range(FIRST_SEED, FIRST_SEED + self.seeds)
        # Seed by seed, so that a sweep that is ended early covers every point with fewer seeds.
        for seed, workers in itertools.product(seeds, self.workers):
            networks: Iterable[str | None] = self.networks
            # One worker has no network, so it runs once for all of them.
            if workers == 1 or self.is_modelled:
                networks = (None,)
            for network, variant in itertools.product(networks, self.variants):
                words: Sequence[str] | None = ()
                if self.tuning is not None:
                    words = (tuned or {}).get((variant.name, workers))
                points.append(self._point(variant, workers, network, seed, words))
        taken: dict[str, Point] = {}
        for point in points:
            other = taken.setdefault(point.name, point)
            if other is point:
                continue
            first, second = point.algorithm, other.algorithm
            if first == second and point.network != other.network:
                first, second = str(point.network), str(other.network)
            raise ConfigurationError(
                "the names of algorithms and networks must differ in letters and digits, "
                f"not {first!r} and {second!r}: both runs would be {point.name!r}, so rename one"
            )
        return points

    def trial(
        self, variant: Variant, workers: int, trial: Trial, before: Sequence[str] | None
    ) -> Point:
        """Return the run that tries a value, on loopback: steps do not depend on the network.

        Args:
            variant: The algorithm.
            workers: Number of workers.
            trial: The value.
            before: Arguments of the parameters that were tuned before; None if not known yet.
        """
        assert self.tuning is not None, "only a sweep with tuning has trials"
        words: tuple[str, ...] | None = None
        if before is not None:
            # The last of several equal options counts.
            words = (*before, trial.parameter, repr(trial.value), *self.tuning.horizon)
        return self._point(variant, workers, None, self.tuning.seed, words, trial)

    def _point(
        self,
        variant: Variant,
        workers: int,
        network: str | None,
        seed: int,
        tuned: Sequence[str] | None,
        trial: Trial | None = None,
    ) -> Point:
        # A trial has no network, and the value that it tries takes the place of one in its name.
        tried = ""
        if trial is not None:
            tried = f"{trial.parameter} {trial.value!r}"
        parts = [_slug(variant.name), str(workers), _slug(network or tried), f"s{seed}"]
        name = "-".join(filter(None, parts))
        if len(name) > LONGEST_NAME:
            # Names that differ at their end only must not become the same.
            name = f"{name[: LONGEST_NAME - 9].rstrip('-')}-{_digest(name)}"
        # Runs at the same time would slow down each other.
        request: dict[str, Any] = {
            "backend": self.backend,
            "light_target": self.light,
            "exclusive": True,
        }
        if network is not None:
            # As a text, which the master understands without the file that describes the network.
            request["network"] = str(self.networks[network])
        words = [*self.arguments, *variant.arguments, *(tuned or ())]
        if self.task is not None:
            request.update(task=self.task.key, arguments=words)
        elif self.script:
            # The method of a script is an option of its observer.
            options = [*variant.arguments, *self.observer]
            arguments = [*self.arguments, *(tuned or ())]
            request["command"] = observe_command(options, [*self.script, *arguments])
        else:
            request["command"] = shlex.join([*shlex.split(self.command or ""), *words])
        # The series adds the seed to the arguments, or puts it in place of {seed} in the command.
        series = RunSeries(name, (workers,), request, self.task, seed=seed)
        # A script that takes no seed can be repeated, too: its times are never the same.
        if not self.script:
            try:
                series.check_seeds()
            except ValueError as error:
                raise ConfigurationError(str(error)) from None
        request = {**series.requests()[0], "name": name}
        # The name is known before the tuned arguments, so that the run can be counted and looked
        # for.
        if tuned is None:
            request = {}
        return Point(name, variant.name, workers, network, seed, request, trial)


def load_sweep(path: Path, folder: Path | None = None) -> Sweep:
    """Read a sweep from its TOML file.

    Args:
        path: The file.
        folder: The folder to which names of other files in it are relative; None for its own.

    Raises:
        ConfigurationError: The file cannot be read, or a key is unknown or has a wrong value.
    """
    # Python 3.10 has no tomllib.
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        text = read_text(path)
        return parse_sweep(tomllib.loads(text), folder or path.parent, path.stem)
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
            hint = hint_for(key, _KEYS, "the keys are")
            raise ValueError(f"key {key!r} must be one that a sweep has: {hint}")
    given = [key for key in ("task", "command", "script") if key in content]
    if len(given) != 1:
        hint = ': write for example task = "1a"'
        if given:
            hint = f", not {' and '.join(given)}: remove all but one"
        raise ValueError(f"one of task, command and script must be given{hint}")
    task: Task | None = None
    command: str | None = None
    script: tuple[str, ...] = ()
    backend = BACKENDS[0]
    if "task" in content:
        task = get_task(_text(content, "task"))
        backend = task.backends[0]
    elif "command" in content:
        command = _command(_text(content, "command"), folder)
    else:
        script = tuple(shlex.split(_text(content, "script")))
    _check_keys(content)
    if "backend" in content:
        backend = _text(content, "backend")
    check_backend(backend, task, gpu=False)
    arguments = _words(content.get("arguments", []), "arguments")
    # The sweep adds nothing to the arguments of a script.
    if not script and (option := _own_option(arguments)):
        raise ValueError(f"arguments must not have {option}: the sweep gives it to each run")
    workers = _workers(content.get("workers"))
    seeds = content.get("seeds", 1)
    if not _is_count(seeds) or seeds > _MOST_SEEDS:
        raise ValueError(
            f"seeds must be a whole number from 1 to {_MOST_SEEDS}, not {seeds!r}: give the repeats"
        )
    is_modelled = _is_modelled(content)
    limit_s = _seconds(content, "limit")
    repeat_stopped = _switch(content, "repeat_stopped", default=True)
    # Without a limit, no run is stopped, so there is nothing to leave out.
    if limit_s is None and not repeat_stopped:
        raise ValueError(
            'limit must be given with repeat_stopped = false: write for example limit = "2min"'
        )
    # _networks and _pricing add the files that they read.
    files: dict[str, Path] = {}
    if "title" in content:
        title = _text(content, "title")
    variants = _variants(content, task)
    # The options of a script that is measured unchanged are its own.
    if not script and _own_option(_given_words(content, variants), (_FIXED_TIME,)):
        raise ValueError(
            f"a sweep must not have {_FIXED_TIME}: it compares times, which are equal after "
            "a fixed training time, so use mlbench run, and mlbench compare for the values"
        )
    return Sweep(
        title=title,
        variants=variants,
        workers=workers,
        networks=_networks(content.get("networks", []), workers, folder, files),
        seeds=seeds,
        task=task,
        command=command,
        script=script,
        observer=_observer(content),
        backend=backend,
        arguments=arguments,
        light=_switch(content, "light", default=False),
        is_modelled=is_modelled,
        limit_s=limit_s,
        budget_s=_seconds(content, "budget"),
        repeat_stopped=repeat_stopped,
        price=_pricing(content, folder, files),
        tuning=_tuning(content, variants),
        files=files,
    )


def copied_name(name: str) -> str:
    """Return the name in :data:`FILES` of the copy of a file.

    The copies of two files of one name in different folders have different names.
    """
    return f"{_digest(name)}-{Path(name).name}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _tuning(content: Mapping[str, Any], variants: Sequence[Variant]) -> Tuning | None:
    if "tuning" not in content:
        return None
    tuning = parse_tuning(content["tuning"], [variant.name for variant in variants])
    if "script" in content and "goal" not in content:
        raise ValueError(
            "goal must be given with tuning, which compares steps to the goal: "
            "write for example goal = 'val_loss<=1.5'"
        )
    given = _given_words(content, variants)
    if option := _own_option(tuning.parameters):
        raise ValueError(f"parameter of tuning must not be {option}: the sweep gives it")
    if option := _own_option(given, tuning.parameters):
        raise ValueError(f"arguments must not have {option}: it is tuned, so remove it")
    if option := _own_option(tuning.horizon, (*_OWN_OPTIONS, *tuning.parameters)):
        raise ValueError(f"horizon of tuning must not have {option}: the sweep gives it")
    return tuning


def _given_words(content: Mapping[str, Any], variants: Iterable[Variant]) -> list[str]:
    """Return the words for the script in all places of a file, except those of the tuning."""
    given = [*content.get("arguments", []), *shlex.split(content.get("script", ""))]
    given += shlex.split(content.get("command", ""))
    for variant in variants:
        given += variant.arguments
    return given


def _own_option(arguments: Sequence[str], options: Sequence[str] = _OWN_OPTIONS) -> str | None:
    """Return an option among the arguments that the sweep gives itself, or None."""
    for option in options:
        if option in arguments or option_value(arguments, option) is not None:
            return option
    return None


def _add_file(name: str, folder: Path, files: dict[str, Path]) -> Path:
    """Add a file that a sweep names to ``files``, and return its path."""
    # Next to sweep.toml in the folder of a sweep, there are only copies.
    path = folder / FILES / copied_name(name)
    if not path.is_file():
        path = folder / name
    return files.setdefault(name, path)


def _pricing(content: Mapping[str, Any], folder: Path, files: dict[str, Path]) -> Pricing:
    if "price" not in content:
        return Pricing()
    price = content["price"]
    if not isinstance(price, Mapping):
        raise ValueError(
            f'price must be a table, not {price!r}: write [price], then machine = "aws-c5.xlarge"'
        )
    if unknown := set(price) - {"machine", "spot", "prices"}:
        raise ValueError(
            "price must have the keys machine, spot and prices only, "
            f"not {min(unknown)!r}: remove it"
        )
    spot = price.get("spot", False)
    if not isinstance(spot, bool):
        raise ValueError(f"spot of price must be true or false, not {spot!r}: remove the quotes")
    prices: Path | None = None
    if "prices" in price:
        prices = _add_file(_text(price, "prices"), folder, files)
    machines = load_prices(prices)
    name = price.get("machine")
    if name not in machines:
        raise ValueError(f"machine of price must be one of {', '.join(machines)}, not {name!r}")
    return Pricing(machines[name], spot)


def _command(text: str, folder: Path) -> str:
    """Return a command with the full path of its script, because workers run in other folders."""
    words = shlex.split(text)
    # The first two words: a script, or a Python and its script. Later ones are arguments.
    for position, word in enumerate(words[:2]):
        if word.endswith(".py") and (folder / word).is_file():
            words[position] = str((folder / word).absolute())
    return shlex.join(words)


def _check_keys(content: Mapping[str, Any]) -> None:
    """Refuse keys of a script without one, and keys that a script cannot have."""
    if "script" in content:
        for key, advice in _NOT_OF_SCRIPT.items():
            if key in content:
                raise ValueError(f"{key} must not be given with script: {advice}")
        return
    for key in ("methods", "metrics", "goal"):
        if key in content:
            raise ValueError(
                f'{key} must be given with script only: write for example script = "train.py"'
            )


@contextmanager
def in_words_of_file() -> Iterator[None]:
    """Give an error of an option the words of the key of a sweep's file that has its value."""
    try:
        yield
    except ConfigurationError as error:
        text = str(error)
        for pattern, words in _WORDS_OF_OPTIONS:
            text = re.sub(pattern, words, text)
        raise ConfigurationError(text) from None


def _observer(content: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the options of the observer that a file describes, except the method."""
    metrics = content.get("metrics", {})
    if not isinstance(metrics, Mapping):
        raise ValueError(
            f"metrics must be a table, not {metrics!r}: write for example "
            "metrics = {val_loss = 'val loss ([0-9.]+)'}"
        )
    # Checked here, before the first run, although the observer in each worker reads them again.
    words, parsed = [], []
    with in_words_of_file():
        for name in metrics:
            text = f"{name}={_text(metrics, name)}"
            parsed.append(parse_metric(text))
            words += ["--metric", text]
        if "goal" in content:
            text = _text(content, "goal")
            parse_goal(text, parsed)
            words += ["--goal", text]
    return tuple(words)


def _methods(content: Mapping[str, Any]) -> list[Variant]:
    """Return the variants of a script, which are its methods."""
    variants = []
    for text in _words(content.get("methods", []), "methods", '["as-is", "bf16"]'):
        with in_words_of_file():
            method = parse_method(text)
        variants.append(Variant(method.label, ("--method", str(method))))
    if not variants:
        raise ValueError(
            'methods must be given with script: write for example methods = ["as-is", "bf16"]'
        )
    return variants


def _variants(content: Mapping[str, Any], task: Task | None) -> tuple[Variant, ...]:
    if "script" in content:
        variants = _methods(content)
    else:
        variants = [*_algorithms(content, task), *_tables(content)]
    if not variants:
        raise ValueError(
            'algorithms must be given: write for example algorithms = ["centralized_sgd"]'
        )
    names = [variant.name for variant in variants]
    for variant in variants:
        # The name is the label of the algorithm in all figures and tables.
        if names.count(variant.name) > 1:
            raise ValueError(
                "algorithms, variants and methods must have different names, "
                f"not {variant.name!r} twice"
            )
        if not _slug(variant.name):
            raise ValueError(
                f"name of a variant must have a letter or a digit, not {variant.name!r}"
            )
        if option := _own_option(variant.arguments):
            raise ValueError(
                f"arguments of {variant.name!r} must not have {option}: the sweep gives it"
            )
    return tuple(variants)


def _algorithms(content: Mapping[str, Any], task: Task | None) -> list[Variant]:
    """Return the variants that ``algorithms`` names."""
    variants = []
    for name in _words(content.get("algorithms", []), "algorithms"):
        if task is not None and name not in task.optimizers:
            hint = hint_for(name, task.optimizers, "they are")
            raise ValueError(
                f"algorithms must be values of --optimizer of task {task.key}, not {name!r}: {hint}"
            )
        variants.append(Variant(name, ("--optimizer", name)))
    return variants


def _tables(content: Mapping[str, Any]) -> list[Variant]:
    """Return the variants of the tables ``variants``."""
    variants = []
    tables = content.get("variants", [])
    if not isinstance(tables, list) or not all(isinstance(table, Mapping) for table in tables):
        raise ValueError(
            "variants must be tables: write [[variants]], then name = ... and arguments = [...]"
        )
    for table in tables:
        if set(table) != {"name", "arguments"}:
            raise ValueError(
                "a table of variants must have name and arguments, "
                f"not {', '.join(table) or 'nothing'}"
            )
        variants.append(Variant(_text(table, "name"), _words(table["arguments"], "arguments")))
    return variants


def _is_modelled(content: Mapping[str, Any]) -> bool:
    """Return True if the seconds of a sweep are modelled."""
    time = content.get("time", "measured")
    if time not in ("measured", "modelled"):
        raise ValueError(
            f'time must be "measured" or "modelled", not {time!r}: remove it to measure'
        )
    if time == "modelled" and "limit" in content:
        raise ValueError(
            'limit must not be given with time = "modelled", because workers that share cores '
            "train for more seconds: end the runs by arguments of the script, such as its number "
            "of epochs or steps"
        )
    return bool(time == "modelled")


def _networks(
    value: Any, workers: Sequence[int], folder: Path, files: dict[str, Path]
) -> dict[str, Network]:
    networks: dict[str, Network] = {}
    for name in _words(value, "networks", '["lan-1g"]'):
        if name in networks:
            raise ValueError(f"networks must differ, not {name!r} twice: remove one")
        text = name
        if name.endswith(".toml"):
            text = str(_add_file(name, folder, files))
        networks[name] = get_network(text)
        for number in workers:
            if number > 1:
                # A network with racks has a fixed number of hosts.
                networks[name].check_hosts(number)
    if not networks and max(workers) > 1:
        raise ValueError(
            'networks must be given for several workers: write for example networks = ["lan-1g"]'
        )
    return networks


def _workers(value: Any) -> tuple[int, ...]:
    numbers = value
    # A single number may be written without brackets.
    if not isinstance(value, list):
        numbers = [value]
    if not numbers or not all(map(_is_count, numbers)) or max(numbers) > MAX_HOSTS:
        raise ValueError(
            f"workers must be whole numbers from 1 to {MAX_HOSTS}, not {value!r}: write [1, 2, 4]"
        )
    return tuple(dict.fromkeys(numbers))


def _is_count(value: Any) -> bool:
    # A bool is an int for isinstance.
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


def _words(value: Any, key: str, example: str = '["--dataset", "digits"]') -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(word, str) and word for word in value):
        raise ValueError(
            f"{key} must be a list of texts, not {value!r}: write for example {example}"
        )
    return tuple(value)


def _seconds(content: Mapping[str, Any], key: str) -> float | None:
    if key not in content:
        return None
    return parse_time(key, content[key])


def parse_time(name: str, value: Any) -> float:
    """Return the seconds of a text such as "2min".

    Args:
        name: Name of the value, for the error.
        value: The text.

    Raises:
        ValueError: It is not a number with a unit, or the number is 0.

    Example:
        >>> parse_time("limit", "1.5min")
        90.0
    """
    match: re.Match[str] | None = None
    if isinstance(value, str):
        match = _TIME.fullmatch(value.strip())
    if match:
        seconds = float(match[1]) * _UNITS[match[2]]
        if seconds:
            return seconds
    raise ValueError(
        f'{name} must be a time such as "90s", "2min" or "3h", not {value!r}: give number and unit'
    )


def _slug(text: str) -> str:
    """Return the letters and digits of a text, with hyphens between them."""
    if text.endswith(".toml"):
        text = text.removesuffix(".toml").replace("\\", "/").rpartition("/")[2]
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
