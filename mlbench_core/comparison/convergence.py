r"""Check that runs converge as fast as the reference of their task, by the rule of MLPerf.

A submission that reaches the goal in suspiciously few epochs has often changed the training
problem. MLPerf therefore publishes reference convergence points and refuses submissions that are
faster than chance allows. The rule is that of the package ``mlperf-logging`` (``rcp_checker``). The
reference has :math:`n` seeds with the olympic mean :math:`m` and the standard deviation :math:`s`
(divisor :math:`n`). The olympic mean of :math:`k` runs must then be at least

.. math::

    m - t_{0.95, \nu} \; s \sqrt{\frac{1}{n - 2} + \frac{1}{k - 2}}, \qquad
    \nu = (n - 2) + (k - 2) - 2

This is Student's one-sided test at 5 % under equal variances. The two values that each olympic mean
leaves out do not count in the sizes. The same distance above :math:`m` is the limit for
"suspiciously slow", which MLPerf does not check.

Most tasks validate once an epoch, so the quantity is discrete: the goal was reached at some moment
of the last epoch. If all seeds need the same number of epochs, :math:`s` is 0, and MLPerf's rule
refuses every smaller mean. Here :math:`s` is at least the standard deviation of a rounding error,
:math:`r / \sqrt{12}` for the resolution :math:`r` (1 epoch). Two of five runs may then be one epoch
faster, and three may not. A resolution of 0 gives MLPerf's rule without this change.
"""

from __future__ import annotations

import json
import math
import operator
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mlbench_core.arguments import check_finite_at_least_0, check_int, check_positive
from mlbench_core.comparison.significance import known_values, student_cdf, student_quantile
from mlbench_core.errors import ConfigurationError
from mlbench_core.files import replacing

__all__ = [
    "LEAST_RUNS",
    "LEAST_SEEDS",
    "NEUTRAL_OPTIONS",
    "ConvergenceCheck",
    "Reference",
    "check_convergence",
    "deciding_options",
    "find_reference",
    "load_references",
]

SIGNIFICANCE = 0.05
"""Error probability of each of the two one-sided tests."""

LEAST_SEEDS = 10
"""Number of seeds that a reference needs."""

LEAST_RUNS = 3
"""Number of runs that a check needs; the olympic mean leaves two of them out."""

NEUTRAL_OPTIONS = frozenset(
    (
        # Places, how numbers are sent, and when a run ends.
        *("backend", "checkpoint", "data", "epochs", "gpu", "hosts", "past_goal", "rank", "resume"),
        *("root_checkpoint", "root_dataset", "root_output", "run_id", "seed", "timeout"),
        *("no_checkpoint", "validation_only"),
        # The configuration has separate fields for these.
        *("dataset", "light", "light_target", "optimizer", "preset", "variant"),
        # They change the rounding of the arithmetic only.
        *("channels_last", "compile", "cuda_graphs"),
    )
)
"""Options of the command line that do not decide how many epochs a run needs."""

_FOLDER = Path(__file__).with_name("references")
_SCHEMA_VERSION = 1
_UNITS = ("epochs", "steps")
# The binary search of MLPerf's checker for the smallest accepted mean ends at this distance.
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Reference:
    """The number of epochs or steps to the goal that a task needs, over several seeds.

    Attributes:
        task: Key of the task, for example ``"1a"``.
        dataset: Name of the data set.
        goal: The goal's ``metric``, ``threshold`` and ``minimize``.
        algorithm: Name of the optimizer, as in the configuration of a result.
        workers: Number of workers.
        batch_size: Samples of all workers in a step.
        values: Epochs or steps to the goal, by seed; at least 10 seeds.
        options: Other options that decide the convergence, by name.
        preset: The task's preset, or None.
        unit: ``"epochs"`` or ``"steps"``.
        resolution: Difference between possible values, in the unit: 1 if the goal is checked at the
            end of each epoch.
        version: Version of MLBench.
        date: Day of the runs, as ``2026-11-22``.
        machine: Description of the machine; it does not decide the convergence.
        command: The command that makes this file again.

    Raises:
        TypeError: A number has the wrong type.
        ValueError: There are fewer than 10 seeds, or a value or the unit is not allowed.
    """

    task: str
    dataset: str
    goal: Mapping[str, Any]
    algorithm: str
    workers: int
    batch_size: int
    values: Mapping[int, float]
    options: Mapping[str, Any] = field(default_factory=dict)
    preset: str | None = None
    unit: str = "epochs"
    resolution: float = 1.0
    version: str = ""
    date: str = ""
    machine: str = ""
    command: str = ""

    def __post_init__(self) -> None:
        check_int("workers", self.workers)
        check_int("batch_size", self.batch_size)
        check_finite_at_least_0("resolution", self.resolution)
        if self.unit not in _UNITS:
            raise ValueError(
                f"unit must be 'epochs' or 'steps', not {self.unit!r}: name the unit of the values"
            )
        if len(self.values) < LEAST_SEEDS:
            raise ValueError(
                f"values must have at least {LEAST_SEEDS} seeds, not {len(self.values)}: run "
                "more seeds"
            )
        for seed, value in self.values.items():
            check_positive(f"the value of seed {seed}", value)

    @property
    def mean(self) -> float:
        """Return the olympic mean of the values."""
        return _trimmed_mean(self.values.values())

    @property
    def standard_deviation(self) -> float:
        """Return the standard deviation as MLPerf computes it, at least that of a rounding error.

        It is over all values, with the divisor ``n``.
        """
        # An even distribution over an interval of this length has this standard deviation.
        rounding = self.resolution / math.sqrt(12)
        # Without this limit, a reference whose seeds all need the same number of epochs would
        # refuse every smaller mean.
        return max(statistics.pstdev(self.values.values()), rounding)

    def limits(self, runs: int) -> tuple[float, float]:
        """Return the smallest and the largest olympic mean that agree with this reference.

        Args:
            runs: Number of runs behind the mean, at least 3.

        Returns:
            Both limits, in the unit of the reference.

        Raises:
            TypeError: ``runs`` is not an integer.
            ValueError: ``runs`` is below 3.
        """
        quantile = student_quantile(1 - SIGNIFICANCE, self._df(runs))
        distance = quantile * self.standard_error(runs)
        return max(0.0, self.mean - distance), self.mean + distance

    def standard_error(self, runs: int) -> float:
        """Return the standard error of an olympic mean minus that of this reference.

        Args:
            runs: Number of runs, at least 3.

        Raises:
            TypeError: ``runs`` is not an integer.
            ValueError: ``runs`` is below 3.
        """
        check_int("runs", runs, LEAST_RUNS)
        return self.standard_deviation * math.sqrt(1 / (len(self.values) - 2) + 1 / (runs - 2))

    def p_below(self, mean: float, runs: int) -> float:
        """Return the probability of an olympic mean of ``runs`` runs that is at most ``mean``.

        Args:
            mean: The mean, in the unit of the reference.
            runs: Number of runs, at least 3.

        Raises:
            TypeError: ``runs`` is not an integer.
            ValueError: ``runs`` is below 3.
        """
        error, difference = self.standard_error(runs), mean - self.mean
        if error == 0:
            # Without any deviation, the sign of the difference decides alone.
            if difference == 0:
                return 0.5
            return float(difference > 0)
        return student_cdf(difference / error, self._df(runs))

    def _df(self, runs: int) -> int:
        """Return the degrees of freedom, without the two values that each mean leaves out."""
        # The formula of the module's docstring: (n - 2) + (k - 2) - 2.
        return len(self.values) - 2 + check_int("runs", runs, LEAST_RUNS) - 2 - 2

    def save(self, path: Path) -> None:
        """Write the reference as a JSON file.

        Args:
            path: The file; its folder is created.
        """
        content = {"schema_version": _SCHEMA_VERSION, **asdict(self)}
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Reference:
        """Read a reference from a JSON file.

        Args:
            path: A file that :meth:`save` wrote.

        Raises:
            ConfigurationError: The file cannot be read, has another schema version, or is not a
                valid reference.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8-sig"))
            if not isinstance(content, dict):
                raise TypeError("its content is not an object in braces")
            version = content.pop("schema_version", None)
            if version != _SCHEMA_VERSION:
                raise ValueError(f"its schema_version is {version!r}, not {_SCHEMA_VERSION}")
            # The keys of an object in JSON are texts.
            content["values"] = {int(seed): value for seed, value in content["values"].items()}
            return cls(**content)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            reason = str(error)
            if isinstance(error, KeyError):
                reason = f"the field {error} is missing"
            raise ConfigurationError(
                f"{path} is not a reference: {reason}; make it with benchmarks/references/make.py"
            ) from error


@dataclass(frozen=True)
class ConvergenceCheck:
    """The result of :func:`check_convergence`. A number that the verdict does not have is None.

    Attributes:
        verdict: ``"consistent"``, ``"fast"`` (suspiciously), ``"slow"`` (suspiciously, or two runs
            did not reach the goal), ``"no reference"`` or ``"too few runs"``.
        runs: Number of runs.
        not_reached: How many of them did not reach the goal.
        unit: Unit of the means and limits, ``"epochs"`` or ``"steps"``.
        mean: Olympic mean of the runs; infinite if two or more did not reach the goal.
        reference_mean: Olympic mean of the reference.
        standard_deviation: Standard deviation of the reference.
        smallest: Smallest mean that agrees with the reference.
        largest: Largest mean that agrees with the reference.
        p_fast: Probability of a mean this small or smaller if the runs converge as the reference
            does.
        p_slow: Probability of a mean this large or larger.
        score_factor: The reference's mean divided by the mean, at least 1. MLPerf multiplies the
            time to the goal by this factor, so that lucky seeds give no advantage.
    """

    verdict: str
    runs: int
    not_reached: int
    unit: str | None = None
    mean: float | None = None
    reference_mean: float | None = None
    standard_deviation: float | None = None
    smallest: float | None = None
    largest: float | None = None
    p_fast: float | None = None
    p_slow: float | None = None
    score_factor: float | None = None


def check_convergence(
    values: Iterable[float | None], reference: Reference | None
) -> ConvergenceCheck:
    """Check repeats of one configuration against the reference of their task.

    Args:
        values: Epochs or steps to the goal of each run, in the unit of the reference. None is a
            goal that was not reached. As in MLPerf, one such run counts as the slowest one, which
            the olympic mean leaves out.
        reference: The reference, or None if there is none.

    Returns:
        The verdict and its numbers.

    Raises:
        TypeError: A value is not a number.
        ValueError: A value is not finite and positive.

    Example:
        >>> goal = {"metric": "Prec@1", "threshold": 95.0, "minimize": False}
        >>> seeds = dict(enumerate([9, 8, 10, 9, 8, 9, 10, 9, 8, 10]))
        >>> reference = Reference("1a", "digits", goal, "centralized_sgd", 1, 128, seeds)
        >>> check_convergence([9, 10, 8, 9, 9], reference).verdict
        'consistent'
        >>> check_convergence([6, 7, 6, 7, 6], reference).verdict
        'fast'
    """
    runs = list(values)
    missing = runs.count(None)
    for value in runs:
        if value is not None:
            check_positive("each value", value)
    if reference is None:
        return ConvergenceCheck("no reference", len(runs), missing)
    common: dict[str, Any] = {
        "runs": len(runs),
        "not_reached": missing,
        "unit": reference.unit,
        "reference_mean": reference.mean,
        "standard_deviation": reference.standard_deviation,
    }
    if len(runs) < LEAST_RUNS:
        return ConvergenceCheck("too few runs", **common)
    # The olympic mean leaves out one goal that was not reached. With two, the mean is infinite.
    mean = _trimmed_mean(known_values(runs) + [math.inf] * missing)
    smallest, largest = reference.limits(len(runs))
    verdict = "consistent"
    if mean < smallest - _TOLERANCE:
        verdict = "fast"
    elif mean > largest + _TOLERANCE:
        verdict = "slow"
    p_fast = reference.p_below(mean, len(runs))
    return ConvergenceCheck(
        verdict,
        **common,
        mean=mean,
        smallest=smallest,
        largest=largest,
        p_fast=p_fast,
        p_slow=1 - p_fast,
        score_factor=max(1.0, reference.mean / mean),
    )


def load_references(folder: Path | None = None) -> list[Reference]:
    """Read all references of a folder, in the order of their file names.

    Args:
        folder: Folder with JSON files; by default, that of the references that ship with MLBench.

    Raises:
        ConfigurationError: The folder does not exist, or a file is not a valid reference.

    Example:
        >>> {reference.dataset: len(reference.values) for reference in load_references()}["digits"]
        10
    """
    folder = folder or _FOLDER
    if not folder.is_dir():
        raise ConfigurationError(f"{folder} does not exist: give a folder of references")
    return [Reference.load(path) for path in sorted(folder.glob("*.json"))]


def find_reference(
    configuration: Mapping[str, Any], references: Sequence[Reference] | None = None
) -> Reference | None:
    """Return the reference of a run's configuration.

    The task, the data set, the preset, the goal, the algorithm, the number of workers and all
    options except :data:`NEUTRAL_OPTIONS` must be the same. The global batch size follows from the
    number of workers and the options.

    Args:
        configuration: The ``configuration`` of a result.
        references: The references to search; by default, those that ship with MLBench.

    Returns:
        The reference, or None if there is none.

    Raises:
        ConfigurationError: A reference that ships with MLBench is damaged.
    """
    if references is None:
        references = load_references()
    names = ("task", "dataset", "preset", "algorithm", "workers")
    settings = tuple(map(configuration.get, names))
    goal = _aim(configuration.get("goal") or {})
    options = configuration.get("options") or {}
    for reference in references:
        if (
            settings == operator.attrgetter(*names)(reference)
            and goal == _aim(reference.goal)
            and deciding_options(options) == dict(reference.options)
        ):
            return reference
    return None


def _aim(goal: Mapping[str, Any]) -> tuple[Any, ...]:
    return goal.get("metric"), goal.get("threshold"), goal.get("minimize")


def deciding_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that can decide how many epochs a run needs.

    Their names have underscores instead of hyphens.

    Args:
        options: Options of the command line that differ from their defaults, by name with or
            without hyphens.

    Example:
        >>> deciding_options({"--batch-size": 32, "seed": 7, "channels-last": True})
        {'batch_size': 32}
    """
    deciding = {}
    for option, value in options.items():
        name = option.lstrip("-").replace("-", "_")
        if name not in NEUTRAL_OPTIONS:
            deciding[name] = value
    return deciding


def _trimmed_mean(values: Iterable[float]) -> float:
    """Return the olympic mean of at least three values, which may be infinite."""
    return statistics.fmean(sorted(values)[1:-1])
