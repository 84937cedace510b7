"""Run workers as tasks of a Slurm cluster."""
