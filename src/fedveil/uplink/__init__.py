"""The way up: what protects a contribution, how much noise there is, and what sums contributions."""
