"""Run workers as processes of this machine."""
