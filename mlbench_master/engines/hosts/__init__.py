"""Run workers on several machines that ssh reaches."""
