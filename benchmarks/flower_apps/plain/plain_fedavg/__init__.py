"""Plain federated averaging, written directly on Flower."""
