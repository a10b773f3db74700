"""Optimizers against each other: the same tasks, the same batches, only the learning rate tuned."""
