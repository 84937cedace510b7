"""Sources of the CUDA extension, and the driver that compiles them; no installation contains it."""
