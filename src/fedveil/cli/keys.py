"""`fedveil keys`: signing keys for clients, and the roster that pins them."""

from __future__ import annotations

from pathlib import Path

import typer

from fedveil.cli.tables import listed, plainly


def keys(
    folder: Path = typer.Argument(..., help="A new or empty folder."),
    clients: int = typer.Option(..., "--clients", help="Number of clients."),
) -> None:
    """Make a signing key per client and the roster of their public halves, so that no server can swap keys.

    [bold]Example[/bold]  fedveil keys keys --clients 10, then fedveil run --scheme nadp --roster keys/roster.toml
    """
    from fedveil.runs.terms import create_identities

    roster = create_identities(folder, clients=clients)
    plainly(f"wrote {clients} private keys and {roster}")
    listed(
        "Who gets what",
        (
            f"client-K.key: client K alone, before the run, by a way the server does not control ({folder} holds all "
            "of them: delete what you have handed out)",
            "roster.toml: every client, from the same trusted hand; it holds public keys only, and the server may see "
            "it",
            "the server: nothing; a key it swaps is refused by every client, which names whose it was",
        ),
    )
    plainly(f"next: fedveil run --roster {roster} … (a simulation holds all clients, so it reads all keys from there)")
