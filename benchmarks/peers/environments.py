"""An environment for each peer, `.peers/NAME`, with what `requirements/NAME.txt` pins."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".peers"
REQUIREMENTS = Path(__file__).parent / "requirements"
PEERS = tuple(sorted(file.stem for file in REQUIREMENTS.glob("*.txt")))
HOW_TO_MAKE = "make bench-peers (or python -m benchmarks.peers --make) makes the environments"
_MINUTES = 15


def interpreter(peer: str) -> Path:
    """Where the peer's Python is, or would be."""
    return FOLDER / peer / "bin" / "python"


def made(peer: str, pins: str | None = None) -> bool:
    """Whether its environment was made, to the end and from these requirements (None: those of its file)."""
    stamp = FOLDER / peer / "requirements.txt"
    return interpreter(peer).exists() and stamp.is_file() and stamp.read_text() == (pins or _pins(peer))


def make(peer: str, pins: str | None = None) -> str | None:
    """Make an environment from these requirements (None: those of its file); what went wrong, where something did."""
    if made(peer, pins):
        return None
    pins = pins or _pins(peer)
    FOLDER.mkdir(exist_ok=True)
    listed = FOLDER / f"{peer}.txt"
    listed.write_text(pins)
    pip = [str(interpreter(peer)), "-m", "pip", "install", "--quiet", "--only-binary", ":all:", "-r", str(listed)]
    for command in ([sys.executable, "-m", "venv", "--clear", str(FOLDER / peer)], pip):
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60 * _MINUTES)
        except subprocess.TimeoutExpired:
            return f"{peer}: not installed within {_MINUTES} minutes"
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
            return f"{peer}: {' '.join(errors[-3:]) or 'pip failed'}"
    (FOLDER / peer / "requirements.txt").write_text(pins)
    return None


def _pins(peer: str) -> str:
    return (REQUIREMENTS / f"{peer}.txt").read_text()
