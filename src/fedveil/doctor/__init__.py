"""Whether an installation works: what is there, what is missing, and what to do about it."""

from fedveil.doctor.checkup import CHECKS, Checks, examine
from fedveil.doctor.finding import ADVICE, OK, PROBLEM, Finding

__all__ = ["ADVICE", "CHECKS", "OK", "PROBLEM", "Checks", "Finding", "examine"]
