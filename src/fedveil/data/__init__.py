"""Data sets and how they are dealt to clients: read standard layouts, split, normalise, partition."""

from fedveil.data.dataset import Dataset, Split, Task
from fedveil.data.partition import client_names, owners_of, partition
from fedveil.data.sources import load, source

__all__ = ["Dataset", "Split", "Task", "client_names", "load", "owners_of", "partition", "source"]
