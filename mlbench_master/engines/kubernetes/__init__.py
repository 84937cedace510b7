"""Run workers as pods of a Kubernetes cluster."""
