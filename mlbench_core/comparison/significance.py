r"""Compare repeated measurements: intervals, tests and profiles, in plain Python.

The base installation has no scipy, and the commands that print results must start quickly. So this
module computes Student's t distribution itself, by the regularized incomplete beta function
:math:`I_x(a, b)`:

.. math::

    P(T > t) = \tfrac{1}{2} I_x(\nu / 2, 1 / 2), \qquad x = \frac{\nu}{\nu + t^2}, \quad t \ge 0

for :math:`\nu` degrees of freedom. All measurements must be finite: a run that did not reach its
goal has no time, and must be left out or counted separately.
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mlbench_core.arguments import check_number, check_positive

__all__ = [
    "Description",
    "WelchTest",
    "confidence_interval",
    "describe",
    "holm",
    "log_interval",
    "olympic_mean",
    "paired_test",
    "performance_profile",
    "performance_score",
    "student_cdf",
    "student_quantile",
    "welch_test",
]

_T = TypeVar("_T")
# Above this many degrees of freedom, a normal approximation is exact to 1e-13.
_ALMOST_NORMAL = 1e6
# From here on, the series for the beta function is exact to 1e-12, while the difference of two
# lgamma loses digits.
_LARGE_SHAPE = 20.0
_SMALLEST = 1e-300


def known_values(values: Iterable[_T | None]) -> list[_T]:
    """Return the values that are not None, for statistics over the runs that measured something.

    Args:
        values: One value for each run; None if the run does not know it.
    """
    return [value for value in values if value is not None]


def student_cdf(t: float, df: float) -> float:
    """Return the probability that a variable with Student's t distribution is at most ``t``.

    Args:
        t: The value; may be infinite.
        df: Degrees of freedom, above 0; not necessarily an integer.

    Returns:
        A probability with an absolute error below 1e-9.

    Raises:
        TypeError: An argument is not a number.
        ValueError: ``t`` is NaN, or ``df`` is not positive and finite.

    Example:
        >>> round(student_cdf(2.262, df=9), 4)
        0.975
    """
    check_number("t", t)
    check_positive("df", df)
    if math.isnan(t):
        raise ValueError("t must be a number, not nan: check the measurements that it comes from")
    tail = _upper_tail(abs(float(t)), float(df))
    return 1 - tail if t > 0 else tail


def student_quantile(p: float, df: float) -> float:
    """Return the quantile of Student's t distribution for the probability ``p``.

    A variable with this distribution is at most the quantile with probability ``p``.

    Args:
        p: Probability, above 0 and below 1.
        df: Degrees of freedom, above 0; not necessarily an integer.

    Returns:
        The quantile. It is infinite if it is too large for a float, as for ``df=0.01``.

    Raises:
        TypeError: An argument is not a number.
        ValueError: ``p`` is not between 0 and 1, or ``df`` is not positive and finite.

    Example:
        >>> round(student_quantile(0.975, df=9), 3)
        2.262
    """
    check_number("p", p)
    check_positive("df", df)
    if not 0 < p < 1:
        raise ValueError(
            f"p must be above 0 and below 1, not {p}: pass 0.975 for the two-sided 95 % quantile"
        )
    if p == 0.5:
        return 0.0
    # The distribution is symmetric, so the quantile of the smaller tail is enough.
    df, share = float(df), float(min(p, 1 - p))
    lower, upper = 0.0, 1.0
    # Double the upper end until the quantile is below it.
    while _upper_tail(upper, df) > share:
        lower, upper = upper, 2 * upper
        if math.isinf(upper):
            break
    # Bisection needs about 40 steps, but cannot diverge as Newton's method does in heavy tails.
    while math.isfinite(upper):
        middle = lower + (upper - lower) / 2
        if middle in (lower, upper) or upper - lower < 1e-13 * upper:
            break
        if _upper_tail(middle, df) > share:
            lower = middle
        else:
            upper = middle
    return -upper if p < 0.5 else upper


def confidence_interval(values: Iterable[float], level: float = 0.95) -> tuple[float, float] | None:
    """Return the confidence interval of the mean, by Student's t distribution.

    Args:
        values: Independent measurements, for example the seconds to the goal of each repeat.
        level: Confidence level, above 0 and below 1.

    Returns:
        Lower and upper end, or None for fewer than two values.

    Raises:
        TypeError: A value is not a number.
        ValueError: A value is not finite, or ``level`` is not between 0 and 1.

    Example:
        >>> [round(end, 2) for end in confidence_interval([9.0, 10.0, 11.0])]
        [7.52, 12.48]
    """
    numbers = _numbers("values", values)
    _check_level(level)
    if len(numbers) < 2:
        return None
    mean = statistics.fmean(numbers)
    error = statistics.stdev(numbers) / math.sqrt(len(numbers))
    # The normal distribution would give an interval that is too narrow: for 5 runs, its factor is
    # 1.96 instead of 2.78.
    half = student_quantile((1 + level) / 2, len(numbers) - 1) * error
    return mean - half, mean + half


def log_interval(values: Iterable[float], level: float = 0.95) -> tuple[float, float] | None:
    """Return the confidence interval of the geometric mean.

    It is that of Student's t distribution on the logarithms. Times vary by factors, and are never
    negative; neither is this interval.

    Args:
        values: Independent measurements, for example the seconds to the goal of each repeat.
        level: Confidence level, above 0 and below 1.

    Returns:
        Lower and upper end; None for fewer than two values, or if a value is not positive.

    Raises:
        TypeError: A value is not a number.
        ValueError: A value is not finite, or ``level`` is not between 0 and 1.

    Example:
        >>> [round(end, 2) for end in log_interval([1.0, 2.0])]
        [0.02, 115.61]
    """
    numbers = _numbers("values", values)
    if min(numbers, default=math.inf) <= 0:
        return None
    # The interval assumes about a normal distribution, which the logarithms of times have.
    interval = confidence_interval(map(math.log, numbers), level)
    if interval is None:
        return None
    low, high = interval
    # The exponential of 710 is too large for a float.
    return math.exp(min(low, 709.0)), math.exp(min(high, 709.0))


def holm(values: Sequence[float]) -> list[float]:
    """Adjust the p values of several tests by Holm's method.

    With adjusted values, the probability that any of the tests shows a difference that does not
    exist is at most the level, whatever the tests have in common.

    Args:
        values: The p values, each from 0 to 1.

    Returns:
        The adjusted values in the same order.

    Raises:
        TypeError: A value is not a number.
        ValueError: A value is not between 0 and 1.

    Example:
        >>> [round(p, 6) for p in holm([0.01, 0.04, 0.03])]
        [0.03, 0.06, 0.06]

    References:
        Holm: A simple sequentially rejective multiple test procedure. Scandinavian Journal of
        Statistics 6, 1979.
    """
    for value in values:
        check_number("values", value)
        if not 0 <= value <= 1:
            raise ValueError(f"values must be from 0 to 1, not {value}: pass p values")
    adjusted = [0.0] * len(values)
    largest = 0.0
    ascending = sorted(range(len(values)), key=lambda index: values[index])
    for rank, index in enumerate(ascending):
        # An adjusted value is never below that of a smaller p value.
        largest = max(largest, min(1.0, (len(values) - rank) * values[index]))
        adjusted[index] = largest
    return adjusted


def olympic_mean(values: Iterable[float]) -> float | None:
    """Return the mean without the smallest and the largest value, as MLPerf scores repeats.

    Args:
        values: Measurements.

    Returns:
        The mean of the others, or None for fewer than three values.

    Raises:
        TypeError: A value is not a number.
        ValueError: A value is not finite.

    Example:
        >>> olympic_mean([10.0, 12.0, 11.0, 90.0])
        11.5
    """
    numbers = sorted(_numbers("values", values))
    if len(numbers) < 3:
        return None
    return statistics.fmean(numbers[1:-1])


@dataclass(frozen=True)
class Description:
    """The usual statistics of repeated measurements, in the unit of the measurements.

    Attributes:
        n: Number of values.
        mean: Their mean, or None without any.
        standard_deviation: Standard deviation of the sample (divisor ``n - 1``), or None for fewer
            than two values.
        median: Their median, or None without any.
        interval: 95 % confidence interval of the mean, or None for fewer than two values.
        olympic_mean: Mean without the smallest and the largest value, or None for fewer than three
            values.
    """

    n: int
    mean: float | None
    standard_deviation: float | None
    median: float | None
    interval: tuple[float, float] | None
    olympic_mean: float | None


def describe(values: Iterable[float]) -> Description:
    """Return the usual statistics of repeated measurements.

    Args:
        values: Independent measurements, possibly none.

    Raises:
        TypeError: A value is not a number.
        ValueError: A value is not finite.

    Example:
        >>> describe([10.0, 12.0, 11.0, 90.0]).median
        11.5
    """
    numbers = _numbers("values", values)
    mean: float | None = None
    median: float | None = None
    standard_deviation: float | None = None
    if numbers:
        mean, median = statistics.fmean(numbers), statistics.median(numbers)
    if len(numbers) >= 2:
        standard_deviation = statistics.stdev(numbers)
    return Description(
        n=len(numbers),
        mean=mean,
        standard_deviation=standard_deviation,
        median=median,
        interval=confidence_interval(numbers),
        olympic_mean=olympic_mean(numbers),
    )


@dataclass(frozen=True)
class WelchTest:
    """The result of :func:`welch_test` or :func:`paired_test`.

    Attributes:
        difference: Mean of ``a`` minus mean of ``b``, in the unit of the values.
        interval: Confidence interval of the difference, in the same unit.
        effect: The difference in standard deviations, Hedges' g. It is infinite if neither sample
            varies and the means differ. As a rule of thumb, 0.2 is small, 0.5 is medium and 0.8 is
            large.
        t: The test statistic; infinite if neither sample varies and the means differ.
        df: Degrees of freedom; those of Welch's test are after Welch and Satterthwaite.
        p: Two-sided p value: the probability of a difference at least this large if the true means
            are equal.
        p_less: One-sided p value; small values speak for a smaller true mean of ``a``. For times:
            "``a`` is faster".
        p_greater: One-sided p value; small values speak for a larger true mean of ``a``.
    """

    difference: float
    interval: tuple[float, float]
    effect: float
    t: float
    df: float
    p: float
    p_less: float
    p_greater: float


def welch_test(a: Iterable[float], b: Iterable[float], level: float = 0.95) -> WelchTest:
    r"""Test whether two samples have different means, without assuming equal variances.

    With means :math:`m`, standard deviations :math:`s` and sizes :math:`n`,

    .. math::

        t = \frac{m_a - m_b}{\sqrt{e_a^2 + e_b^2}}, \quad e = \frac{s}{\sqrt{n}}, \quad
        \nu = \frac{(e_a^2 + e_b^2)^2}{e_a^4 / (n_a - 1) + e_b^4 / (n_b - 1)}

    The effect size is Hedges' g: :math:`m_a - m_b` divided by the pooled standard deviation, times
    the correction :math:`1 - 3 / (4 (n_a + n_b) - 9)` for small samples.

    If neither sample varies, the test is decided by the means alone: equal means give t = 0 and p =
    1, others give an infinite t and p = 0. The degrees of freedom are then :math:`n_a + n_b - 2`,
    and the interval is a single point. Such a sample often means that the same run was measured
    twice, or that the quantity is too coarse.

    Args:
        a: At least two independent measurements.
        b: At least two independent measurements.
        level: Level of the confidence interval, above 0 and below 1.

    Returns:
        Difference, interval, effect and p values.

    Raises:
        TypeError: A value is not a number.
        ValueError: A sample has fewer than two values, a value is not finite, or ``level`` is not
            between 0 and 1.

    Example:
        >>> test = welch_test([9.8, 10.1, 10.0], [11.9, 12.3, 12.1])
        >>> round(test.difference, 2), test.p_less < 0.001
        (-2.13, True)

    References:
        Welch: The generalization of "Student's" problem when several different population variances
        are involved. Biometrika 34, 1947.

        Hedges: Distribution theory for Glass's estimator of effect size and related estimators.
        Journal of Educational Statistics 6, 1981.
    """
    first, second = _sample("a", a), _sample("b", b)
    _check_level(level)
    n_a, n_b = len(first), len(second)
    s_a, s_b = statistics.stdev(first), statistics.stdev(second)
    e_a, e_b = s_a / math.sqrt(n_a), s_b / math.sqrt(n_b)
    difference = statistics.fmean(first) - statistics.fmean(second)
    error = math.hypot(e_a, e_b)
    total = n_a + n_b
    if error == 0:
        df = float(total - 2)
        t = effect = math.copysign(math.inf, difference) if difference else 0.0
        half = 0.0
    else:
        # Each error divided by the total error: fourth powers of very small errors would otherwise
        # become 0.
        df = 1 / ((e_a / error) ** 4 / (n_a - 1) + (e_b / error) ** 4 / (n_b - 1))
        t = difference / error
        half = student_quantile((1 + level) / 2, df) * error
        weight_a, weight_b = math.sqrt((n_a - 1) / (total - 2)), math.sqrt((n_b - 1) / (total - 2))
        pooled = math.hypot(weight_a * s_a, weight_b * s_b)
        # The last factor is the correction of Hedges for small samples.
        effect = difference / pooled * (1 - 3 / (4 * total - 9))
    return WelchTest(
        difference=difference,
        interval=(difference - half, difference + half),
        effect=effect,
        t=t,
        df=df,
        p=2 * student_cdf(-abs(t), df),
        p_less=student_cdf(t, df),
        p_greater=student_cdf(-t, df),
    )


def paired_test(a: Iterable[float], b: Iterable[float], level: float = 0.95) -> WelchTest:
    r"""Test whether two samples that belong together in pairs have different means.

    It is Student's t test. With the mean :math:`m` and the standard deviation :math:`s` of the
    :math:`n` differences :math:`a_i - b_i`, :math:`t = m \sqrt{n} / s` with :math:`n - 1` degrees
    of freedom. The effect size is that of :func:`welch_test`.

    Args:
        a: At least two measurements.
        b: The measurement that belongs to each of ``a``, in the same order.
        level: Level of the confidence interval, above 0 and below 1.

    Returns:
        Difference, interval, effect and p values.

    Raises:
        TypeError: A value is not a number.
        ValueError: The samples have fewer than two values or different lengths, a value is not
            finite, or ``level`` is not between 0 and 1.

    Example:
        >>> test = paired_test([10.0, 20.0, 30.0], [11.0, 21.2, 31.1])
        >>> round(test.p, 3), round(welch_test([10.0, 20.0, 30.0], [11.0, 21.2, 31.1]).p, 3)
        (0.003, 0.9)
    """
    first, second = _sample("a", a), _sample("b", b)
    _check_level(level)
    if len(first) != len(second):
        raise ValueError(f"b must have {len(first)} values as a has, not {len(second)}: pass pairs")
    differences = list(map(operator.sub, first, second))
    difference, df = statistics.fmean(differences), float(len(first) - 1)
    error = statistics.stdev(differences) / math.sqrt(len(first))
    if error == 0:
        t = math.copysign(math.inf, difference) if difference else 0.0
    else:
        t = difference / error
    half = student_quantile((1 + level) / 2, df) * error
    return WelchTest(
        difference=difference,
        interval=(difference - half, difference + half),
        effect=welch_test(first, second).effect,
        t=t,
        df=df,
        p=2 * student_cdf(-abs(t), df),
        p_less=student_cdf(t, df),
        p_greater=student_cdf(-t, df),
    )


def performance_profile(
    times: Mapping[str, Mapping[str, float | None]], ratios: Sequence[float]
) -> dict[str, list[float]]:
    r"""Return the share of tasks that each algorithm solves within a factor of the best time.

    With :math:`t_{as}` the time of algorithm :math:`a` on task :math:`s`, the profile is

    .. math::

        \rho_a(\tau) = \frac{1}{|S|} \left|\left\{ s : t_{as} \le \tau \min_b t_{bs} \right\}\right|

    A goal that was not reached counts as an infinite time. A task that nobody solved still counts
    in :math:`|S|`.

    Args:
        times: Time to the goal, in any unit, by algorithm and task. None or a missing task means
            that the goal was not reached.
        ratios: The factors :math:`\tau`, each at least 1.

    Returns:
        The shares in the order of ``ratios``, by algorithm.

    Raises:
        TypeError: A time or ratio is not a number.
        ValueError: ``times`` has no algorithm or no task, a time is not positive and finite, or a
            ratio is below 1.

    Example:
        >>> times = {"sgd": {"1a": 10.0, "2a": 40.0}, "adam": {"1a": 15.0, "2a": None}}
        >>> performance_profile(times, [1, 2])
        {'sgd': [1.0, 1.0], 'adam': [0.0, 0.5]}

    References:
        Dolan, Moré: Benchmarking optimization software with performance profiles.
        arXiv:cs/0102001.

        Dahl et al.: Benchmarking neural network training algorithms. arXiv:2306.07179.
    """
    for ratio in ratios:
        check_number("ratios", ratio)
        if not (ratio >= 1 and math.isfinite(ratio)):
            raise ValueError(
                f"ratios must be finite and at least 1, not {ratio}: the best time has ratio 1"
            )
    profile = {}
    for name, row in _ratios(times).items():
        ascending = sorted(row)
        # The position to the right of equal values is the number of tasks within the ratio.
        profile[name] = [bisect.bisect_right(ascending, ratio) / len(row) for ratio in ratios]
    return profile


def performance_score(
    times: Mapping[str, Mapping[str, float | None]], tau_max: float = 4.0
) -> dict[str, float]:
    r"""Return AlgoPerf's score of each algorithm, from 0 to 1.

    It is the area below the algorithm's performance profile:

    .. math::

        B_a = \frac{1}{\tau_{max} - 1} \int_1^{\tau_{max}} \rho_a(\tau) \, d\tau

    The profile is a step function, so the integral is exact: a task with ratio :math:`r` adds
    :math:`\max(0, \tau_{max} - r)`.

    Args:
        times: As for :func:`performance_profile`.
        tau_max: Upper limit of the integral, above 1; AlgoPerf uses 4.

    Returns:
        The score by algorithm. The best algorithm on every task has score 1.

    Raises:
        TypeError: A time or ``tau_max`` is not a number.
        ValueError: ``times`` has no algorithm or no task, a time is not positive and finite, or
            ``tau_max`` is not finite and above 1.

    Example:
        >>> performance_score({"sgd": {"1a": 10.0, "2a": 40.0}, "adam": {"1a": 25.0, "2a": None}})
        {'sgd': 1.0, 'adam': 0.25}

    References:
        Dahl et al.: Benchmarking neural network training algorithms. arXiv:2306.07179.
    """
    check_number("tau_max", tau_max)
    if not (tau_max > 1 and math.isfinite(tau_max)):
        raise ValueError(f"tau_max must be finite and above 1, not {tau_max}: AlgoPerf uses 4")
    scores = {}
    for name, row in _ratios(times).items():
        areas = []
        for ratio in row:
            # A task above the upper limit, as one that was not solved, adds nothing.
            areas.append(max(0.0, tau_max - ratio))
        scores[name] = math.fsum(areas) / (tau_max - 1) / len(row)
    return scores


def _ratios(times: Mapping[str, Mapping[str, float | None]]) -> dict[str, list[float]]:
    """Return each algorithm's time on each task, divided by the best time on that task.

    The ratio of a goal that was not reached is infinite.
    """
    tasks = dict.fromkeys(itertools.chain.from_iterable(times.values()))
    if not tasks:
        raise ValueError(
            "times must have at least one algorithm and one task, not none: pass {algorithm: "
            "{task: time}}"
        )
    rows = {}
    for name, by_task in times.items():
        for task, time in by_task.items():
            if time is not None:
                check_positive(f"the time of {name} on {task}", time)
        # Performance profiles count a missed goal as an infinite time.
        rows[name] = [by_task.get(task) or math.inf for task in tasks]
    # At most the largest float: the time of a task that nobody solved stays infinite if it is
    # divided by it, while inf / inf is nan.
    best = []
    for column in zip(*rows.values(), strict=True):
        best.append(min(sys.float_info.max, *column))
    ratios = {}
    for name, row in rows.items():
        ratios[name] = list(map(operator.truediv, row, best))
    return ratios


def _numbers(name: str, values: Iterable[float]) -> list[float]:
    """Return measurements as floats, or name the first one that is not finite in an error."""
    numbers = []
    for position, value in enumerate(values):
        check_number(f"{name}[{position}]", value)
        if not math.isfinite(value):
            raise ValueError(
                f"{name}[{position}] must be finite, not {value}: leave out runs without a "
                "measurement"
            )
        numbers.append(float(value))
    return numbers


def _sample(name: str, values: Iterable[float]) -> list[float]:
    numbers = _numbers(name, values)
    if len(numbers) < 2:
        raise ValueError(
            f"{name} must have at least 2 values, not {len(numbers)}: repeat the run with "
            "other seeds"
        )
    return numbers


def _check_level(level: float) -> None:
    check_number("level", level)
    if not 0 < level < 1:
        raise ValueError(f"level must be above 0 and below 1, not {level}: pass 0.95 for 95 %")


def _upper_tail(t: float, df: float) -> float:
    """Return P(T > t) for t >= 0."""
    if math.isinf(t):
        return 0.0
    if df > _ALMOST_NORMAL:
        # Abramowitz and Stegun, 26.7.8; divided before it is squared, because t * t could overflow.
        z = t * (1 - 1 / (4 * df)) / math.hypot(1, t / math.sqrt(2 * df))
        return math.erfc(z / math.sqrt(2)) / 2
    if t == 0:
        return 0.5
    # With x = 1 / (1 + ratio^2); logarithms, because the square overflows in heavy tails.
    log_ratio = math.log(t) - math.log(df) / 2
    log_sum = math.log1p(math.exp(2 * log_ratio)) if log_ratio < 100 else 2 * log_ratio
    x, a, b = math.exp(-log_sum), df / 2, 0.5
    # The logarithm of x^a (1 - x)^b / B(a, b).
    log_front = -a * log_sum + b * (2 * log_ratio - log_sum) - _log_beta_half(a)
    # Each continued fraction converges quickly on one side of the mean of the beta distribution
    # only.
    if x < (a + 1) / (a + b + 2):
        return math.exp(log_front) * _beta_fraction(x, a, b) / a / 2
    return (1 - math.exp(log_front) * _beta_fraction(-math.expm1(-log_sum), b, a) / b) / 2


def _log_beta_half(a: float) -> float:
    """Return the logarithm of the beta function B(a, 1/2)."""
    if a < _LARGE_SHAPE:
        return math.lgamma(a) + math.lgamma(0.5) - math.lgamma(a + 0.5)
    # Asymptotic series of lgamma(a + 1/2) - lgamma(a) in 1 / a.
    inverse = 1 / a
    ratio = math.log(a) / 2 - inverse / 8 + inverse**3 / 192 - inverse**5 / 640
    return math.lgamma(0.5) - ratio


def _beta_fraction(x: float, a: float, b: float) -> float:
    """Return the continued fraction of the incomplete beta function.

    It is DLMF 8.17.22, by the method of Lentz.
    """
    c, d = 1.0, _reciprocal(1 - (a + b) * x / (a + 1))
    fraction = d
    # Each step has the even and the odd coefficient of the fraction, both of order m.
    for m in range(1, 10_000):
        before = fraction
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = _reciprocal(1 + term * d)
            c = 1 + term / c
            c = c if abs(c) > _SMALLEST else _SMALLEST
            fraction *= c * d
        if abs(fraction - before) <= 1e-16 * abs(fraction):
            break
    return fraction


def _reciprocal(value: float) -> float:
    """Return 1 / value; a tiny number takes the place of a value near 0."""
    return 1 / (value if abs(value) > _SMALLEST else _SMALLEST)
