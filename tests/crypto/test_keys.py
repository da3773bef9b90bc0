from __future__ import annotations

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from fedveil.crypto.keys import Identity, Roster, RunKey, extract
from fedveil.errors import ConfigError, ProtocolError
from fedveil.secrets import OsSecrets, SecretStream, SeededSecrets


class Fixed(SecretStream):
    """A stream of known bytes, for known answers."""

    def __init__(self, content: str) -> None:
        super().__init__(None)
        self.content = bytes.fromhex(content)

    def bytes(self, count: int) -> bytes:
        assert count == len(self.content)
        return self.content


# RFC 7748, section 6.1
ALICE = Fixed("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
BOB = Fixed("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
SHARED = bytes.fromhex("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742")


def test_public_keys_and_agreement_are_those_of_rfc_7748() -> None:
    alice, bob = RunKey(ALICE), RunKey(BOB)
    assert alice.public.hex() == "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
    assert bob.public.hex() == "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
    secret = alice.agree(bob.public, run="r", own=0, peer=1)
    assert secret._extracted == extract(SHARED, salt=b"r")


def test_extraction_and_expansion_are_those_of_rfc_5869() -> None:
    extracted = extract(bytes.fromhex("0b" * 22), salt=bytes(range(13)))
    assert extracted.hex() == "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5"
    expanded = HKDFExpand(hashes.SHA256(), 42, bytes(range(0xF0, 0xFA))).derive(extracted)
    assert expanded.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"


def test_both_ends_of_a_pair_get_the_same_seed() -> None:
    alice, bob = RunKey(ALICE), RunKey(BOB)
    one = alice.agree(bob.public, run="run", own=3, peer=7)
    other = bob.agree(alice.public, run="run", own=7, peer=3)
    assert one.seed(round=2, attempt=0, purpose="mask") == other.seed(round=2, attempt=0, purpose="mask")


def test_a_seed_is_for_one_run_round_attempt_purpose_and_pair() -> None:
    alice, bob = RunKey(ALICE), RunKey(BOB)

    def seed(
        run: str = "run", own: int = 0, peer: int = 1, round: int = 0, attempt: int = 0, purpose: str = "mask"
    ) -> bytes:
        return alice.agree(bob.public, run=run, own=own, peer=peer).seed(round=round, attempt=attempt, purpose=purpose)

    changed = [{"run": "ru"}, {"own": 2}, {"peer": 2}, {"round": 1}, {"attempt": 1}, {"purpose": "noise"}]
    seeds = {seed(), *(seed(**one) for one in changed)}  # type: ignore[arg-type]
    assert len(seeds) == 1 + len(changed)
    # Run and purpose stand side by side: neither can borrow letters from the other.
    assert seed(run="ab", purpose="c") != seed(run="a", purpose="bc")


@pytest.mark.parametrize("public", [b"", bytes(31), bytes(32), b"\x01" + bytes(31)])
def test_unusable_keys_are_refused_with_their_owner(public: bytes) -> None:
    with pytest.raises(ProtocolError, match="client 5"):
        RunKey(OsSecrets().stream()).agree(public, run="r", own=0, peer=5)


def test_nobody_agrees_with_itself() -> None:
    key = RunKey(OsSecrets().stream())
    with pytest.raises(ProtocolError, match="itself"):
        key.agree(key.public, run="r", own=4, peer=4)


def roster_of(count: int) -> tuple[list[Identity], Roster]:
    identities = [Identity(SeededSecrets(1).stream("identity", k)) for k in range(count)]
    return identities, Roster({k: one.public for k, one in enumerate(identities)})


def test_a_server_that_swaps_a_key_is_caught_and_the_client_named() -> None:
    identities, roster = roster_of(3)
    honest, swapped = RunKey(OsSecrets().stream()), RunKey(OsSecrets().stream())
    signature = identities[1].sign_key(run="r", client=1, public=honest.public)
    roster.check(client=1, run="r", public=honest.public, signature=signature)
    with pytest.raises(ProtocolError, match="client 1"):
        roster.check(client=1, run="r", public=swapped.public, signature=signature)
    with pytest.raises(ProtocolError, match="client 1"):
        roster.check(
            client=1,
            run="r",
            public=swapped.public,
            signature=identities[2].sign_key(run="r", client=1, public=swapped.public),
        )


@pytest.mark.parametrize(("run", "client"), [("another run", 1), ("r", 2)])
def test_a_signature_serves_no_other_run_and_no_other_client(run: str, client: int) -> None:
    identities, roster = roster_of(3)
    public = RunKey(OsSecrets().stream()).public
    signature = identities[1].sign_key(run="r", client=1, public=public)
    with pytest.raises(ProtocolError, match=f"client {client}"):
        roster.check(client=client, run=run, public=public, signature=signature)


def test_a_stranger_is_not_in_the_roster() -> None:
    _, roster = roster_of(2)
    with pytest.raises(ProtocolError, match="client 9 is not in the roster"):
        roster.check(client=9, run="r", public=bytes(32), signature=bytes(64))


def test_a_roster_survives_its_file() -> None:
    _, roster = roster_of(12)
    assert Roster.parse(roster.to_toml()) == roster


ONE_KEY = "'" + "01" * 32 + "'"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[clients]",
        "[clients]\n0 = 'xyz'",
        "[clients]\n0 = 5",
        f"[clients]\na = {ONE_KEY}",
        f"[clients]\n0 = {ONE_KEY}\n1 = {ONE_KEY}",
    ],
)
def test_a_wrong_roster_file_is_refused(content: str) -> None:
    with pytest.raises(ConfigError, match=r"^roster.toml"):
        Roster.parse(content, where="roster.toml")


@pytest.mark.parametrize(
    "secret", [RunKey(ALICE), Identity(ALICE), RunKey(ALICE).agree(RunKey(BOB).public, run="r", own=0, peer=1)]
)
def test_keys_do_not_print_themselves(secret: object) -> None:
    assert repr(secret) == f"<{type(secret).__name__}: hidden>"
