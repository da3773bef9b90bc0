"""The same two roles where the model lives with the clients (ParaAegis and its baselines)."""
