"""One client's refusal, whatever it says, decides for no other client and does not end a run."""

from __future__ import annotations

import pytest

from federation import job, server_of
from fedveil.engine import LocalEngine
from fedveil.errors import Code, ProtocolError, Refusal
from fedveil.protocol.messages import Train
from fedveil.protocol.phases import Ask, Gathered
from fedveil.runs.loop import Outcome, client_role, conduct, fresh_state, privacy_journal_of


def ran(refused: dict[int, Refusal], *, missing: tuple[int, ...]) -> Outcome:
    """A run of four rounds, of which the second finds these refusing and those gone."""
    one = job(scheme="fedavg", rounds=4)
    real = LocalEngine(client_role(one), one.pool)

    class Engine:
        def gather(self, ask: Ask) -> Gathered:
            if isinstance(ask.common, Train) and ask.common.round == 1:
                return Gathered((), refused, missing, 0, 0)
            return real.gather(ask)

    state = fresh_state(one)
    return conduct(one, Engine(), server_of(one, state), privacy_journal_of(one, None, state), state=state)


@pytest.mark.parametrize("code", Code)
def test_one_client_that_refuses_while_all_others_are_away_costs_a_round_and_no_more(code: Code) -> None:
    outcome = ran({0: Refusal(code, "whatever it likes to say")}, missing=(1, 2, 3, 4))
    assert [("failed" in row) for row in outcome.rows] == [False, True, False, False]
    assert outcome.stopped is None or outcome.stopped == ""


def test_a_run_that_everybody_refuses_ends() -> None:
    with pytest.raises(ProtocolError, match="Round 2 failed"):
        ran({client: Refusal(Code.PROTOCOL, "no") for client in range(5)}, missing=())


def test_a_run_that_everybodys_own_limits_end_is_over_with_what_it_has() -> None:
    outcome = ran({client: Refusal(Code.ENDED, "no more") for client in range(5)}, missing=())
    assert len(outcome.rows) == 1
    assert "no more" in str(outcome.stopped)
