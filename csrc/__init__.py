"""CUDA sources of the operators of attention, and their build."""
