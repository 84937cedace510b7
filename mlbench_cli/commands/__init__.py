"""The commands: each module holds one group of them."""
