"""A certificate authority, a server certificate it signs, and the keys by which SuperNodes prove who they are."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedveil.errors import ConfigError

if TYPE_CHECKING:
    from cryptography import x509

_CLOCKS_MAY_DIFFER = datetime.timedelta(hours=1)
_LONGEST_COMMON_NAME = 64


class Certificates:
    """Where the files of one SuperLink lie: `ca` goes to everybody, the two keys to nobody."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = folder / "ca.pem"  # every node and everybody who submits runs needs it
        self.ca_key = folder / "ca.key"  # only needed to sign another certificate
        self.server, self.server_key = folder / "server.pem", folder / "server.key"


def create_certificates(folder: str | Path, *, hosts: Sequence[str], days: int = 365) -> Certificates:
    """A new authority and a server certificate for `hosts` (names and addresses); nothing is overwritten."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    if not hosts:
        raise ConfigError("A server certificate needs at least one host name or address.")
    if days < 1:
        raise ConfigError(f"A certificate must be valid for at least one day (got {days}).")
    names = [_alternative(host) for host in dict.fromkeys(hosts)]
    made = Certificates(Path(folder))
    for path in (made.ca, made.ca_key, made.server, made.server_key):
        _require_new(path)
    made.folder.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.UTC)
    until = now + datetime.timedelta(days=days)

    def subject(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:_LONGEST_COMMON_NAME])])

    def usage(*, signs: bool) -> x509.KeyUsage:
        return x509.KeyUsage(
            digital_signature=not signs,
            key_cert_sign=signs,
            crl_sign=signs,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )

    ca_key = ec.generate_private_key(ec.SECP384R1())
    ca_identity = x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key())
    ca_name = subject("FedVeil certificate authority")

    def issued(name: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(ca_name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _CLOCKS_MAY_DIFFER)
            .not_valid_after(until)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )

    ca = (
        issued(ca_name, ca_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage(signs=True), critical=True)
        .sign(ca_key, hashes.SHA384())
    )
    server_key = ec.generate_private_key(ec.SECP384R1())
    server = (
        issued(subject(hosts[0]), server_key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(ca_identity), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    for path, key in ((made.ca_key, ca_key), (made.server_key, server_key)):
        text = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        write_new(path, text, private=True)
    for path, certificate in ((made.ca, ca), (made.server, server)):
        write_new(path, certificate.public_bytes(serialization.Encoding.PEM))
    return made


def create_node_key(file: str | Path) -> Path:
    """A SuperNode's private key in `file` and its public half in `file`.pub, as ssh-keygen writes them.

    Returns the public file, which whoever runs the SuperLink registers.
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    private = Path(file)
    public = private.with_name(private.name + ".pub")
    for path in (private, public):
        _require_new(path)
    private.parent.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP384R1())
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    line = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    write_new(private, text, private=True)
    write_new(public, line + f" {private.name}\n".encode())
    return public


def write_new(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write a file that must not exist yet; a private one is readable by its owner only, from the first byte on."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o644)
    except FileExistsError:
        raise ConfigError(f"{path} exists already, and keys are never overwritten. Give another place.") from None
    with os.fdopen(handle, "wb") as file:
        file.write(content)


def _require_new(path: Path) -> None:
    if path.exists():
        raise ConfigError(f"{path} exists already, and keys are never overwritten. Give another place.")


def _alternative(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not host.isascii() or not host or any(character.isspace() or character in "/:@" for character in host):
        raise ConfigError(
            f"{host!r} is neither a host name nor an address: write it like flower.example.org or 10.0.0.5."
        )
    return x509.DNSName(host)
