"""Carry tensors between workers: messages, buckets, overlap, shared memory, and their times."""
