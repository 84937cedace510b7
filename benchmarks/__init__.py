"""Reference implementations of the tasks, installed as the package ``mlbench_benchmarks``."""
