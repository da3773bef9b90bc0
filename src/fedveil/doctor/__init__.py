"""Whether an installation works: what is there, what is missing, and what to do about it."""

from fedveil.doctor.checkup import ADVICE, CHECKS, OK, PROBLEM, Checks, Finding, examine

__all__ = ["ADVICE", "CHECKS", "OK", "PROBLEM", "Checks", "Finding", "examine"]
