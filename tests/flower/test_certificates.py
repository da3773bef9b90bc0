"""Certificates that a TLS client accepts for their hosts and no others; keys that nobody else can read."""

from __future__ import annotations

import shutil
import socket
import ssl
import stat
import subprocess
import threading
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fedveil.errors import ConfigError
from fedveil.flower.certificates import Certificates, create_certificates, create_node_key


@pytest.fixture
def made(tmp_path: Path) -> Certificates:
    return create_certificates(tmp_path / "certificates", hosts=["flower.example.org", "127.0.0.1", "::1"], days=30)


def shake_hands(made: Certificates, host: str, *, ca: Path | None = None) -> None:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(made.server, made.server_key)
    client = ssl.create_default_context(cafile=str(ca or made.ca))
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    ours, theirs = socket.socketpair()
    ours.settimeout(5)
    theirs.settimeout(5)

    def serve() -> None:
        try:
            server.wrap_socket(theirs, server_side=True).close()
        except OSError:
            theirs.close()

    serving = threading.Thread(target=serve)
    serving.start()
    try:
        client.wrap_socket(ours, server_hostname=host).close()
    finally:
        ours.close()
        serving.join()


@pytest.mark.parametrize("host", ["flower.example.org", "127.0.0.1", "::1"])
def test_a_strict_client_accepts_the_server_under_every_name_it_was_made_for(made: Certificates, host: str) -> None:
    shake_hands(made, host)


def test_a_client_refuses_it_under_another_name_or_another_authority(made: Certificates, tmp_path: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match=r"not valid for|mismatch"):
        shake_hands(made, "evil.example.org")
    other = create_certificates(tmp_path / "other", hosts=["127.0.0.1"])
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(made, "127.0.0.1", ca=other.ca)


def test_private_keys_are_their_owners_alone_and_days_are_kept(made: Certificates) -> None:
    for key in (made.ca_key, made.server_key):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    certificate = x509.load_pem_x509_certificate(made.server.read_bytes())
    assert (certificate.not_valid_after_utc - certificate.not_valid_before_utc).days == 30


def test_nothing_is_overwritten_not_even_a_part(made: Certificates, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in made.folder.iterdir()}
    made.ca.unlink()
    with pytest.raises(ConfigError, match=r"ca\.key exists already"):
        create_certificates(made.folder, hosts=["localhost"])
    assert {path.name: path.read_bytes() for path in made.folder.iterdir()} == {
        name: text for name, text in before.items() if name != "ca.pem"
    }


@pytest.mark.parametrize(
    ("hosts", "days", "said"),
    [
        pytest.param([], 1, "at least one host", id="none"),
        pytest.param(["a b"], 1, "neither a host name", id="space"),
        pytest.param(["https://x.org"], 1, "neither a host name", id="url"),
        pytest.param(["x.org:8000"], 1, "neither a host name", id="port"),
        pytest.param(["zürich.ch"], 1, "neither a host name", id="not-ascii"),
        pytest.param(["x.org"], 0, "at least one day", id="days"),
    ],
)
def test_bad_hosts_and_days_are_named_and_leave_nothing(tmp_path: Path, hosts: list[str], days: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        create_certificates(tmp_path / "new", hosts=hosts, days=days)
    assert not (tmp_path / "new").exists()


def test_a_node_key_is_a_p384_key_as_ssh_keygen_writes_it(tmp_path: Path) -> None:
    public = create_node_key(tmp_path / "node-0.key")
    private = tmp_path / "node-0.key"
    assert public == tmp_path / "node-0.key.pub"
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    key, half = load_ssh_private_key(private.read_bytes(), None), load_ssh_public_key(public.read_bytes())
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert isinstance(key.curve, ec.SECP384R1)
    assert key.public_key() == half
    if keygen := shutil.which("ssh-keygen"):
        told = subprocess.run([keygen, "-y", "-f", private], capture_output=True, text=True, check=True).stdout
        assert told.split()[:2] == public.read_text().split()[:2]
    with pytest.raises(ConfigError, match="never overwritten"):
        create_node_key(private)
