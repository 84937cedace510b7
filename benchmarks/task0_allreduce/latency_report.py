"""Collect and save all measurements of one run of Task 0, with machine and methodology.

The JSON file has everything, the CSV file one row for each size and type.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from latency import LatencyFit, Measurement, fit_latency

from mlbench_core import files
from mlbench_core.errors import ConfigurationError

__all__ = ["LatencyReport"]

FORMAT = "mlbench-latency-1"


@dataclass
class LatencyReport:
    """The measurements of one collective, one backend and one number of workers.

    Attributes:
        machine: Facts about the machine, for example cores and hosts.
        versions: Version of each software package, by name.
        methodology: Settings of the measurement, for example the requested number of
            ``repetitions``.
        left_out: Requests that were not measured, for example types, each with the reason.
        measurements: One entry for each size and type.

    Example:
        >>> times = [(size, (1e-4 + size * 4e-9,)) for size in (1, 10, 100)]
        >>> case = ("all_reduce", "gloo", "cpu", "float32", 2)
        >>> measured = [Measurement(*case, n, 4 * n, 9, t) for n, t in times]
        >>> print(LatencyReport(measurements=measured).fits()["float32"])
        100 µs + n / (1 GB/s)
    """

    machine: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    methodology: Mapping[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)

    def of(self, dtype: str) -> list[Measurement]:
        """Return the measurements of one type, by size.

        Args:
            dtype: Its name, for example ``"float32"``.
        """
        measurements = [m for m in self.measurements if m.dtype == dtype]
        return sorted(measurements, key=attrgetter("size_bytes"))

    @property
    def dtypes(self) -> list[str]:
        """Return the names of the measured types, in the order of their first measurements."""
        return list(dict.fromkeys(map(attrgetter("dtype"), self.measurements)))

    @property
    def title(self) -> str:
        """Return one line: the collective, the backend, the device and the number of workers."""
        if not self.measurements:
            return "nothing measured"
        first = self.measurements[0]
        return f"{first.collective}, {first.backend}, {first.device}, {first.world_size} workers"

    def numbers(self) -> Iterator[tuple[str, float, int]]:
        """Yield name, value and number of the size of each result.

        The names begin with the operation and the type, as one run has one operation but several
        types."""
        for dtype in self.dtypes:
            for number, measurement in enumerate(self.of(dtype)):
                row = measurement.row()
                for name in ("elements", "mean_s", "p50_s", "p99_s", "bus_bandwidth_bytes_per_s"):
                    yield f"{measurement.collective}_{dtype}_{name}", row[name], number
        for dtype, fit in self.fits().items():
            prefix = f"{self.measurements[0].collective}_{dtype}"
            yield f"{prefix}_alpha_s", fit.alpha_s, 0
            # An infinite bandwidth, from times that do not grow with the size, is not a number for
            # the master.
            if fit.beta_bytes_per_s < math.inf:
                yield f"{prefix}_beta_bytes_per_s", fit.beta_bytes_per_s, 0

    def fits(self) -> dict[str, LatencyFit]:
        """Fit latency and bandwidth of each type to the medians.

        Types with a single measured size are left out.
        """
        fits = {}
        for dtype in self.dtypes:
            measurements = self.of(dtype)
            sizes = [m.size_bytes for m in measurements]
            if len(set(sizes)) > 1:
                fits[dtype] = fit_latency(sizes, [m.statistics.p50_s for m in measurements])
        return fits

    def incomplete(self) -> list[Measurement]:
        """Return the measurements with fewer repetitions than ``methodology["repetitions"]``."""
        requested = self.methodology.get("repetitions", 0)
        return [m for m in self.measurements if m.repetitions < requested]

    def wrong(self) -> list[Measurement]:
        """Return the measurements whose results were wrong."""
        return list(filter(attrgetter("wrong_elements"), self.measurements))

    def to_json(self) -> str:
        """Return everything as JSON text; an infinite bandwidth of a fit is null."""
        fits = {}
        for dtype, fit in self.fits().items():
            fits[dtype] = dataclasses.asdict(fit)
            # Python would write "Infinity", which is not JSON, so other readers refuse it.
            if fit.beta_bytes_per_s == math.inf:
                fits[dtype]["beta_bytes_per_s"] = None
        content = {
            "format": FORMAT,
            "title": self.title,
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "methodology": dict(self.methodology),
            "left_out": self.left_out,
            "fits": fits,
            "measurements": [{**m.row(), "seconds": list(m.seconds)} for m in self.measurements],
        }
        return json.dumps(content, indent=1)

    def to_csv(self) -> str:
        """Return CSV text: a line of names, then a line for each measurement.

        Values are in seconds and bytes per second.
        """
        text = io.StringIO()
        rows = list(map(Measurement.row, self.measurements))
        names = list(rows[0]) if rows else []
        writer = csv.DictWriter(text, fieldnames=names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()

    def save(self, stem: Path) -> tuple[Path, Path]:
        """Write the CSV and the JSON file. A reader sees the old file or the complete new one.

        Args:
            stem: The path of both files without the suffix; the folder is created.

        Returns:
            The paths of the CSV and the JSON file.

        Raises:
            ConfigurationError: A file cannot be written.
        """
        paths = stem.with_name(stem.name + ".csv"), stem.with_name(stem.name + ".json")
        try:
            for path, text in zip(paths, (self.to_csv(), self.to_json()), strict=True):
                with files.replacing(path) as temporary:
                    temporary.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(
                f"the results cannot be written to {stem.parent} ({error.strerror}); choose "
                "another --root-output"
            ) from error
        return paths

    @classmethod
    def load(cls, path: Path) -> LatencyReport:
        """Read a JSON file that :meth:`save` wrote.

        Args:
            path: The file.

        Returns:
            The report.

        Raises:
            ConfigurationError: The file cannot be read or has another format.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise ValueError(f"its format is {content['format']!r}")
            # A row of the file also has statistics and bandwidths. They follow from the times and
            # are not read.
            names = [each.name for each in dataclasses.fields(Measurement)]
            report = cls(
                machine=content["machine"],
                versions=content["versions"],
                methodology=content["methodology"],
                left_out=content["left_out"],
            )
            for row in content["measurements"]:
                values = {name: row[name] for name in names}
                values["seconds"] = tuple(row["seconds"])
                report.measurements.append(Measurement(**values))
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"{path} is not a result of Task 0 in JSON ({error})"
            ) from error
        return report
