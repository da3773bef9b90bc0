"""Thin layers over the `cryptography` package."""
