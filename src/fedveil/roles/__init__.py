"""The two roles of a run: a round is read in `server.py` and `client.py`, top to bottom."""
