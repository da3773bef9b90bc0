"""Runs: from a configuration to a trained model, a folder, and a summary."""
