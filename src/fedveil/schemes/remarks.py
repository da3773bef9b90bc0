"""Sentences that several schemes' ledgers need, written once."""

from __future__ import annotations

SIZES = "every client's number of samples is public"
KEYS = "pair secrets are unknown to the server: without a roster, it neither swapped keys nor invented clients"
ROSTER = "pair secrets are unknown to the server: every key is signed by the one that the roster pins"
CLIP = "honest clients clip and add noise as the protocol says; what others do does not matter"
GAUSSIAN = "Gaussian samples are real numbers: floating-point side channels are not part of the claim"
HONEST_ARRIVALS = "the server is honest about whose upload did not arrive"
CRAFTED = (
    "a server that crafts the model it sends can make the sum reveal one client: clients cannot inspect a veiled model"
)
SECRET_BATCH = "nobody but the client knows which records a round's batch holds: each is drawn by its own secrets"
REPAIRS = (
    "the server asks for repairs only of clients whose upload it has not got, or books what it got: one that lies sees "
    "an upload under its residual noise alone (dropouts = tolerate needs no such trust)"
)
VEIL = "the model is hidden from clients only up to secret scales: measured, not proven"
MODEL_OPEN = "the model: every client sees it"
CLIENT_VIEW = "what other clients learn from the models they are sent is bounded only through the noise in the sum"
