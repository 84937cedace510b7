"""The Helm chart of MLBench; installed as the package ``mlbench_helm``."""
