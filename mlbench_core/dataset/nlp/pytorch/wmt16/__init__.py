"""WMT16: the tokenizer and the batches of task 4a."""
