"""The import path of version 3.0 for the vocabulary of the Transformer."""
