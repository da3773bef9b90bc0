"""CKKS for sums: the public key encrypts vectors and adds them, the secret key reads the sum."""

from fedveil.crypto.ciphertexts import set_workers, workers
from fedveil.crypto.ckks.keys import PublicKey, SecretKey, generate, require
from fedveil.crypto.ckks.ring import PRECISION, ROUNDED, Parameters, choose
from fedveil.crypto.ckks.vectors import Adder, Summary, decrypt, encrypt, summary

__all__ = [
    "PRECISION",
    "ROUNDED",
    "Adder",
    "Parameters",
    "PublicKey",
    "SecretKey",
    "Summary",
    "choose",
    "decrypt",
    "encrypt",
    "generate",
    "require",
    "set_workers",
    "summary",
    "workers",
]
