"""The audit of a run: real attacks on what each role saw, scored by who knows the truth."""
