"""FedVeil: bidirectional privacy in federated learning."""

from fedveil.version import __version__

__all__ = ["__version__"]
