"""Communication hooks for the data parallelism of PyTorch: DDP and FSDP."""
