"""Run the workers of the local launcher in containers."""
