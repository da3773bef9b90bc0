"""Attacks: each a pure function from what an adversary saw to what it makes of it."""
