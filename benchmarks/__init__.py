"""Reference implementations of the benchmark tasks; installed as the package
``mlbench_benchmarks``."""
