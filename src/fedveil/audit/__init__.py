"""The audit: what each role of a run saw, and what an attacker makes of it."""
