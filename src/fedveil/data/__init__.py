"""Data sets and how they are dealt to clients: read standard layouts, split, normalise, partition."""

from fedveil.data.dataset import Dataset, Split, Task
from fedveil.data.partition import partition
from fedveil.data.sources import load, source

__all__ = ["Dataset", "Split", "Task", "load", "partition", "source"]
