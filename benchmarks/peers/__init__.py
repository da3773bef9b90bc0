"""FedVeil's local simulation and its clipping beside the field's own, each peer in an environment of its own.

    python -m benchmarks.peers --make     # .peers/NAME for every peer, from requirements/NAME.txt
    python -m benchmarks.peers            # one table; --json FILE keeps the figures

Every candidate is a process that waits for its turn: it runs a few rounds, tells how long each took, and waits again.
All of them are given the same samples, batches, cohorts and first model, and must end in the same one. `page` writes
kept figures up.
"""
