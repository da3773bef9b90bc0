"""What an audit does not try on a run, and why: said, so that silence is not taken for safety."""

from __future__ import annotations

from collections.abc import Iterator

from fedveil.protocol.masked import Masked
from fedveil.trials.received import CLIENT
from fedveil.trials.scene import Scene
from fedveil.trials.trial import NOT_TRIED, Finding
from fedveil.trials.uploads import OUTSIDER, SERVER

COALITION = "the server with some clients"
_HELD = "the server holds no model, and what it sees is hidden or noised: no attack on that is built; see ledger.json"
_TOLD = (
    "a client that sides with the server tells it the model and, under a cipher, the key: see ledger.json for what is "
    "then open"
)
_SECRET = "which records were in a secret batch is not recorded, so that nothing can be scored; see ledger.json"
_OWN_NOISE = "colluders would take their own noise off the sum, which no record holds; the ledger counts them"
_SUCCESSIVE = (
    "two successive models less a client's own part are the others' sum; where few take part that could say much, "
    "and no attack on it is built"
)


def missing_trials(scene: Scene) -> Iterator[Finding]:
    """Every adversary and asset of which this audit measures nothing, or not all."""
    scheme = scene.run.job.scheme
    if scene.run.held:
        yield _untried("server", SERVER, _HELD)
        yield _untried("coalition", COALITION, _TOLD)
        yield _untried("wire", OUTSIDER, _HELD)
    elif scene.run.config.secret_sampling:
        yield _untried("server", SERVER, _SECRET)
        yield _untried("wire", OUTSIDER, _SECRET)
    elif isinstance(scheme.uplink, Masked) and scheme.uplink.plan is not None:
        yield _untried("coalition", COALITION, _OWN_NOISE)
    yield _untried("client", CLIENT, _SUCCESSIVE)


def _untried(where: str, adversary: str, reason: str) -> Finding:
    return Finding(f"{where}/not tried", adversary, "data", NOT_TRIED, "–", False, "–", "not applicable", reason)
