"""WMT17: the vocabulary, the batches and the data set of task 4b."""
