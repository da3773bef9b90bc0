"""A client's desk: what it remembers, what it refuses, and that only codes leave it."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from safetensors.torch import load_file

from fedveil import models
from fedveil.client_held.client import UnreadableError
from fedveil.config import RunConfig
from fedveil.errors import (
    Code,
    ConfigError,
    DataError,
    FedVeilError,
    MissingExtraError,
    NumericError,
    ProtocolError,
    Refusal,
    TraceError,
)
from fedveil.flower import messages
from fedveil.flower.client_app import parts_of
from fedveil.flower.client_memory import DamagedError, Memory
from fedveil.flower.home import Home
from fedveil.flower.message_handler import MessageHandler
from fedveil.flower.messages import RollCall, Setup
from fedveil.flower.server_app import serve
from fedveil.framing import pack, unpack
from fedveil.ledger.gaussian import epsilon_of
from fedveil.protocol.codec import decode, encode
from fedveil.protocol.directory import Epoch, Hello
from fedveil.runs.terms import RequiredError, create_identities
from flower.in_process import InProcessGrid, context_of, make_homes

FACTS = {"input_shape": [1, 8, 8], "outputs": 10, "task": "classification", "vocabulary": None}
LINEAGE = "0123456789abcdef" * 2
CPU = torch.device("cpu")

EPOCH = Epoch(0, 0, 2, 3, 3, 0)


def a_setup(**changes: Any) -> Setup:
    given = {"scheme": "veil-secagg", "clients": 3, "rounds": 2, "seed": 1, "batch_size": 16, **changes}
    return Setup.of(RunConfig(**given), FACTS, lineage=LINEAGE, attempt=0)


def parcel(setup: Setup, request: object, message: str = "m1") -> bytes:
    return pack({"setup": setup.to_text(), "message": message}, {"common": encode(request)})


def code(reply: bytes) -> str:
    return str(unpack(reply)[0]["code"])


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return make_homes(tmp_path, 1)[0]


def test_the_same_message_gets_the_same_reply_even_from_another_process(home: Path) -> None:
    setup = a_setup(secrets="os")
    hello = Hello(setup.name + "run", EPOCH)
    first = MessageHandler(home).handle(parcel(setup, hello, "m1"))
    assert not code(first)
    assert MessageHandler(home).handle(parcel(setup, hello, "m1")) == first
    # Another message is answered anew, with the keys that are kept.
    assert unpack(MessageHandler(home).handle(parcel(setup, hello, "m2")))[1] == unpack(first)[1]


def test_a_run_has_one_name_in_an_attempt_and_the_name_says_the_settings(home: Path) -> None:
    """Masks and signatures are bound to the name: clients who were told different settings must share nothing."""
    desk, setup = MessageHandler(home), a_setup(secrets="os")
    other = a_setup(secrets="os", neighbours=2)
    assert setup.name != other.name
    assert code(desk.handle(parcel(setup, Hello("run", EPOCH), "m1"))) == Code.PROTOCOL
    assert code(desk.handle(parcel(setup, Hello(other.name + "run", EPOCH), "m2"))) == Code.PROTOCOL
    for number, epoch in enumerate(
        (Epoch(0, 0, 2, 5, 5, 0), Epoch(0, 0, 2, 5, 3, 0, True), Epoch(0, 0, 1 << 32, 3, 3, 0))
    ):
        assert code(desk.handle(parcel(setup, Hello(setup.name + "run", epoch), f"e{number}"))) == Code.PROTOCOL
    assert code(desk.handle(parcel(setup, Hello(setup.name + "run", EPOCH), "m3"))) == ""
    assert code(desk.handle(parcel(setup, Hello(setup.name + "another", EPOCH), "m4"))) == Code.PROTOCOL


def test_a_new_attempt_begins_without_the_keys_of_the_last(home: Path) -> None:
    desk, setup = MessageHandler(home), a_setup(secrets="os")
    desk.handle(parcel(setup, Hello(setup.name + "run", EPOCH), "m1"))
    later = replace(setup, attempt=1)
    desk.handle(parcel(later, Hello(later.name + "run", EPOCH), "m2"))
    again = Memory(home / "state").recall(LINEAGE, device=CPU)
    assert again is not None
    assert again.state.keys is not None
    assert again.state.keys.run == later.name + "run"
    # Neither does it answer what belongs to the old keys.
    assert code(desk.handle(parcel(setup, Hello(setup.name + "run", EPOCH), "m3"))) == Code.PROTOCOL


def test_settings_do_not_change_in_the_middle_of_an_attempt(home: Path) -> None:
    desk = MessageHandler(home)
    desk.handle(parcel(a_setup(), Hello("run", EPOCH), "m1"))
    assert code(desk.handle(parcel(a_setup(scheme="fedavg"), Hello("run", EPOCH), "m2"))) == Code.PROTOCOL


def test_an_attempt_that_is_over_is_not_taken_up_again(home: Path) -> None:
    desk = MessageHandler(home)
    later = Setup.parse(a_setup().to_text().replace('"attempt":0', '"attempt":1'))
    assert not code(desk.handle(parcel(later, Hello("run", EPOCH), "m1")))
    assert code(desk.handle(parcel(a_setup(), Hello("run", EPOCH), "m2"))) == Code.PROTOCOL


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"FVP1\xff\xff\xff\xff{}", id="a header too long"),
        pytest.param(pack({"setup": "{}", "message": "m"}, {"common": encode(Hello("run", EPOCH))}), id="no setup"),
        pytest.param(pack({"setup": a_setup().to_text(), "message": "m"}, {}), id="no request"),
        pytest.param(pack({"setup": a_setup().to_text(), "message": "m"}, {"common": b"FVW1rubbish"}), id="rubbish"),
        pytest.param(
            pack({"setup": a_setup().to_text().replace(LINEAGE, "../../../../etc/passwd0123456789"), "message": "m"},
                 {"common": encode(Hello("run", EPOCH))}), id="a path for a name"
        ),
        pytest.param(
            pack({"setup": a_setup().to_text().replace('"seed":1', '"seed":"x"'), "message": "m"},
                 {"common": encode(Hello("run", EPOCH))}), id="a seed of letters"
        ),
        pytest.param(
            pack({"setup": a_setup().to_text().replace('"outputs":10', '"outputs":-10'), "message": "m"},
                 {"common": encode(Hello("run", EPOCH))}), id="a negative number of outputs"
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_with_a_code(content: bytes, home: Path) -> None:
    assert code(MessageHandler(home).handle(content)) == Code.PROTOCOL
    assert not [one.name for one in (home / "state").iterdir() if one.name != "state.key"]


@pytest.mark.parametrize("cut", [1, 4, 9, 40, 200, -1])
def test_a_truncated_parcel_is_refused(cut: int, home: Path) -> None:
    whole = parcel(a_setup(), Hello("run", EPOCH))
    assert code(MessageHandler(home).handle(whole[:cut])) == Code.PROTOCOL


@pytest.mark.parametrize(
    ("text", "settings", "expected"),
    [
        pytest.param('[require]\nscheme = "veil-dp"', {}, Code.REQUIRED, id="another scheme"),
        pytest.param('[require]\nscheme = ["veil-dp", "veil-secagg"]', {}, "", id="one of two schemes"),
        pytest.param('[require]\nunmask = "always"', {}, "", id="the scheme's own default"),
        pytest.param('[require]\nunmask = "always"', {"unmask": "on-dropout"}, Code.REQUIRED, id="not the default"),
        pytest.param("", {"model": "os:system"}, Code.REQUIRED, id="a function by name"),
        pytest.param("", {"model": "net.py:make"}, Code.REQUIRED, id="a file that is not listed"),
        pytest.param('models = ["net.py:make"]', {"model": "net.py:make"}, "", id="a file that is listed"),
        pytest.param("", {"clients": 2}, Code.SETTINGS, id="two clients, too few to hide in"),
        pytest.param("", {"dataset": "/etc/passwd"}, Code.DATA, id="a path on this machine"),
        pytest.param("", {"model_options": {"depth": -1}}, Code.SETTINGS, id="an impossible model"),
    ],
)
def test_a_client_takes_part_in_what_its_owner_agrees_to(
    text: str, settings: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    home = make_homes(tmp_path, 1)[0]
    (home / "client.toml").write_text(f"client = 0\nsimulation = true\n{text}\n")
    (home / "net.py").write_text(
        "from torch import nn\n\ndef make(outputs):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, outputs))\n"
    )
    assert code(MessageHandler(home).handle(parcel(a_setup(**settings), RollCall("n")))) == expected


def test_a_simulation_is_refused_unless_the_owner_allows_it(tmp_path: Path) -> None:
    home = make_homes(tmp_path, 1)[0]
    (home / "client.toml").write_text("client = 0\n")
    assert code(MessageHandler(home).handle(parcel(a_setup(), RollCall("n")))) == Code.REQUIRED
    assert code(MessageHandler(home).handle(parcel(a_setup(secrets="os"), RollCall("n")))) == ""


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        pytest.param("raise ValueError('PLANTED 4711')", Code.DATA, id="raises"),
        pytest.param("", Code.DATA, id="no function"),
        pytest.param("def client(n):\n    return [[1.0]], [0]", Code.DATA, id="another shape"),
        pytest.param(
            "import torch\ndef client(n):\n    return torch.full((4, 1, 8, 8), float('nan')), torch.zeros(4).long()",
            Code.DATA,
            id="NaN",
        ),
        pytest.param(
            "import torch\ndef client(n):\n    return torch.ones(4, 1, 8, 8), torch.full((4,), 99)",
            Code.DATA,
            id="a class too many",
        ),
        pytest.param(
            "import torch\ndef client(n):\n    return torch.ones(4, 1, 8, 8), torch.zeros(4).long()", "", id="fine"
        ),
        pytest.param("def client(n):\n    raise KeyError('PLANTED 4711')", Code.DATA, id="fails inside"),
    ],
)  # fmt: skip
def test_a_loader_that_fails_tells_its_own_machine_and_nobody_else(
    loader: str, expected: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home = make_homes(tmp_path, 1)[0]
    facts = "FACTS = dict(input_shape=(1, 8, 8), outputs=10, task='classification')\n"
    (home / "data.py").write_text(facts + loader)
    (home / "client.toml").write_text('client = 0\nsimulation = true\ndata = "data.py"\n')
    with caplog.at_level(logging.WARNING):
        reply = MessageHandler(home).handle(parcel(a_setup(), RollCall("n")))
    assert code(reply) == expected
    assert b"PLANTED" not in reply
    if "PLANTED" in loader:
        assert "PLANTED" in caplog.text


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (UnreadableError("x"), Code.UNREADABLE),
        (ProtocolError("x", code=Code.ENDED), Code.ENDED),
        (RequiredError("x"), Code.REQUIRED),
        (DamagedError("x"), Code.STATE),
        (NumericError("x"), Code.NUMBERS),
        (DataError("x"), Code.DATA),
        (MissingExtraError("x"), Code.EXTRA),
        (ConfigError("x"), Code.SETTINGS),
        (TraceError("x"), Code.SETTINGS),
        (ProtocolError("x"), Code.PROTOCOL),
        (FedVeilError("x"), Code.INTERNAL),
    ],
    ids=lambda one: one if isinstance(one, str) else type(one).__name__,
)
def test_every_error_has_a_code_and_every_code_a_text(error: FedVeilError, expected: Code) -> None:
    assert error.code is expected
    assert messages.refusal_of(expected.value) == Refusal(expected, messages.TEXTS[expected])


def test_whether_a_client_refuses_follows_from_its_owners_description_and_not_from_samples(tmp_path: Path) -> None:
    """A server that asks with ever other numbers of classes learns what the owner says, not the largest label."""
    home = make_homes(tmp_path, 1)[0]
    (home / "data.py").write_text(
        "import torch\nFACTS = dict(input_shape=(1, 8, 8), outputs=10, task='classification')\n"
        "def client(n):\n    return torch.ones(4, 1, 8, 8), torch.tensor([0, 1, 2, 3])\n"
    )
    (home / "client.toml").write_text('client = 0\nsimulation = true\ndata = "data.py"\n')
    desk = MessageHandler(home)
    for outputs in range(2, 13):
        asked = Setup.of(
            RunConfig(scheme="fedavg", clients=3, seed=1), {**FACTS, "outputs": outputs}, lineage=LINEAGE, attempt=0
        )
        assert code(desk.handle(parcel(asked, RollCall("n")))) == ("" if outputs == 10 else Code.DATA)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"scheme": "nadp", "honest_arrivals": True}, id="honest arrivals"),
        pytest.param({"scheme": "nadp", "skip_cancelling": True}, id="noise left out"),
        pytest.param({"scheme": "nadp", "accounting": "paper"}, id="the paper's noise"),
        pytest.param({"scheme": "veil-secagg", "unmask": "on-dropout"}, id="masks opened on the server's word"),
    ],
)
def test_a_server_does_not_vouch_for_itself(settings: dict[str, Any], tmp_path: Path) -> None:
    home = make_homes(tmp_path, 1)[0]
    (home / "client.toml").write_text("client = 0\n")
    asked = parcel(a_setup(secrets="os", **settings), RollCall("n"))
    assert code(MessageHandler(home).handle(asked)) == Code.REQUIRED
    name, value = next((name, value) for name, value in settings.items() if name != "scheme")
    allowed = str(value).lower() if isinstance(value, bool) else f'"{value}"'
    (home / "client.toml").write_text(f"client = 0\n[require]\n{name} = {allowed}\n")
    assert code(MessageHandler(home).handle(asked)) == ""


def test_what_the_owner_changes_counts_from_the_next_message(home: Path) -> None:
    desk = MessageHandler(home)
    assert code(desk.handle(parcel(a_setup(), RollCall("n")))) == ""
    (home / "client.toml").write_text('client = 0\nsimulation = true\n[require]\nscheme = "veil-dp"\n')
    assert code(desk.handle(parcel(a_setup(), RollCall("n")))) == Code.REQUIRED


def test_state_restored_from_a_backup_is_refused(home: Path, tmp_path: Path) -> None:
    desk, setup = MessageHandler(home), a_setup(secrets="os")
    desk.handle(parcel(setup, Hello(setup.name + "run", EPOCH), "m1"))
    shutil.copytree(home / "state", tmp_path / "backup")
    desk.handle(parcel(setup, Hello(setup.name + "run", EPOCH), "m2"))
    shutil.copytree(tmp_path / "backup", home / "state", dirs_exist_ok=True)
    assert code(MessageHandler(home).handle(parcel(setup, Hello(setup.name + "run", EPOCH), "m3"))) == Code.STATE


def test_every_code_has_one_text_and_a_code_nobody_knows_is_not_repeated() -> None:
    assert set(messages.TEXTS) == set(Code)
    assert len(set(messages.TEXTS.values())) == len(Code)
    assert messages.refusal_of("secret 4711") == Refusal(Code.UNKNOWN, messages.TEXTS[Code.UNKNOWN])
    assert "secret" not in messages.TEXTS[Code.UNKNOWN]


def test_damaged_state_is_refused_and_left_alone(home: Path) -> None:
    MessageHandler(home).handle(parcel(a_setup(), Hello("run", EPOCH), "m1"))
    file = home / "state" / f"{LINEAGE}.run.sealed"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    assert code(MessageHandler(home).handle(parcel(a_setup(), Hello("run", EPOCH), "m2"))) == Code.STATE
    assert file.read_bytes() == bytes(content)


def test_state_is_sealed_and_readable_by_its_owner_alone(home: Path) -> None:
    setup = a_setup(secrets="os")
    MessageHandler(home).handle(parcel(setup, Hello(setup.name + "a name to look for", EPOCH), "m1"))
    state = Memory(home / "state").recall(LINEAGE, device=CPU)
    assert state is not None
    assert state.state.keys is not None
    for file in (home / "state").iterdir():
        assert b"a name to look for" not in file.read_bytes()
    assert (home / "state" / "state.key").stat().st_mode & 0o077 == 0


def test_what_was_spent_is_remembered_for_all_runs_under_limits_of_ones_own(tmp_path: Path) -> None:
    """A second run of the same server finds the client's budget used up: its own policy counts all of them."""
    homes = make_homes(tmp_path / "homes", 3)
    for number, home in enumerate(homes):
        (home / "policy.toml").write_text("max_epsilon = 4.0\n")
        (home / "client.toml").write_text(f'client = {number}\nsimulation = true\npolicy = "policy.toml"\n')
    settings = {"dataset": "digits", "model": "mlp", "clients": 3, "rounds": 3, "seed": 1, "batch_size": 16}
    noisy = {**settings, "scheme": "ldp", "epsilon": 3.0, "deadline": 5.0}
    serve(InProcessGrid(homes), context_of(out=str(tmp_path / "first"), **noisy))
    assert Memory(homes[0] / "state").spent() > 0
    serve(InProcessGrid(homes), context_of(out=str(tmp_path / "second"), **noisy, lr=0.2))
    first, second = (json.loads((tmp_path / one / "summary.json").read_text()) for one in ("first", "second"))
    assert first["rounds"] == 3
    assert second["rounds"] < 3
    assert "takes no further part" in second["stopped"]
    # Without a policy every run is held to its own target.
    (homes[0] / "client.toml").write_text("client = 0\nsimulation = true\n")
    desk = MessageHandler(homes[0])
    desk.handle(parcel(a_setup(), Hello("run", EPOCH)))
    kept = Memory(homes[0] / "state").recall(LINEAGE, device=CPU)
    assert kept is not None
    assert kept.state.spent == 0.0


def test_runs_that_are_opened_early_do_not_each_get_the_whole_budget(tmp_path: Path) -> None:
    homes = make_homes(tmp_path / "homes", 3)
    for number, home in enumerate(homes):
        (home / "policy.toml").write_text("max_epsilon = 3.1\n")
        (home / "client.toml").write_text(f'client = {number}\nsimulation = true\npolicy = "policy.toml"\n')
    settings = {"dataset": "digits", "model": "mlp", "clients": 3, "rounds": 2, "seed": 1, "batch_size": 16}
    noisy = {**settings, "scheme": "ldp", "epsilon": 3.0, "deadline": 2.0}

    class Opened(InProcessGrid):
        def push_messages(self, messages: Any) -> list[str]:
            given = list(messages)
            if type(decode(parts_of(given[0].content)["common"])).__name__ == "Train":
                raise KeyboardInterrupt
            return super().push_messages(given)

    for run in "abc":
        with pytest.raises(KeyboardInterrupt):
            serve(Opened(homes), context_of(out=str(tmp_path / run), **noisy))
    for run in "abc":
        with contextlib.suppress(FedVeilError):
            serve(InProcessGrid(homes), context_of(out=str(tmp_path / run), resume=True, **noisy))
    spent = Memory(homes[0] / "state").spent()
    assert 0 < epsilon_of(math.sqrt(spent), 1e-5) <= 3.1


def test_a_roster_proves_who_is_there(tmp_path: Path) -> None:
    roster = create_identities(tmp_path / "keys", clients=3)
    homes = make_homes(tmp_path / "homes", 3)
    keys = tmp_path / "keys"
    for number, home in enumerate(homes):
        key = number if number < 2 else 0  # client 2 has the key of another
        (home / "client.toml").write_text(
            f'client = {number}\nsimulation = true\nroster = "{roster}"\nidentity = "{keys}/client-{key}.key"\n'
        )
    settings = {"dataset": "digits", "model": "mlp", "clients": 3, "rounds": 1, "seed": 1, "batch_size": 16}
    serve(
        InProcessGrid(homes),
        context_of(out=str(tmp_path / "run"), scheme="lossless", roster=str(roster), deadline=3.0, **settings),
    )
    noted = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    turned = [one for one in noted if one["event"] == "turned away"]
    assert [one["node"] for one in turned] == [102]
    assert "cannot sign as that client" in turned[0]["text"]


def test_keys_that_everybody_pins_are_in_the_ledger(tmp_path: Path) -> None:
    roster = create_identities(tmp_path / "keys", clients=3)
    homes = make_homes(tmp_path / "homes", 3)
    settings = {"dataset": "digits", "model": "mlp", "clients": 3, "rounds": 1, "seed": 1, "batch_size": 16}
    assumed = []
    for name in ("without", "with"):
        out = tmp_path / name
        serve(InProcessGrid(homes), context_of(out=str(out), scheme="veil-secagg", deadline=5.0, **settings))
        assumed.append(json.loads((out / "ledger.json").read_text())["lines"][0]["assumptions"])
        for number, home in enumerate(homes):
            (home / "client.toml").write_text(
                f'client = {number}\nsimulation = true\nroster = "{roster}"\n'
                f'identity = "{tmp_path}/keys/client-{number}.key"\n'
            )
    assert "without a roster" in " ".join(assumed[0])
    assert "without a roster" not in " ".join(assumed[1])


OWN = """
import torch

FACTS = dict(input_shape=(5,), outputs=3, task="classification")

def test():
    return torch.zeros(6, 5), torch.zeros(6).long()

def client(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(20 + number, 5, generator=generator), torch.arange(20 + number) % 3
"""


def test_data_of_ones_own_stay_with_each_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    homes = make_homes(tmp_path / "homes", 3)
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "own_data_of_a_test.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path / "app"))
    for number, home in enumerate(homes):
        (home / "loader.py").write_text(OWN)
        (home / "client.toml").write_text(f'client = {number}\nsimulation = true\ndata = "loader.py"\n')
    out = tmp_path / "run"
    settings = {"scheme": "veil-secagg", "model": "mlp", "clients": 3, "rounds": 2, "seed": 1, "deadline": 5.0}
    serve(InProcessGrid(homes), context_of(out=str(out), data="own_data_of_a_test", **settings))
    summary = json.loads((out / "summary.json").read_text())
    assert summary["rounds"] == 2
    assert "test_accuracy" in summary


def first_model(sent: list[Message]) -> torch.Tensor:
    for one in sent:
        request = decode(parts_of(one.content)["common"])
        if type(request).__name__ == "Train":
            found: torch.Tensor = request.broadcast.parameters
            return found
    raise AssertionError


@pytest.mark.parametrize("scheme", ["fedavg", "paraaegis"])
def test_without_a_seed_the_first_model_does_not_follow_from_what_the_other_side_knows(
    scheme: str, tmp_path: Path
) -> None:
    """fedavg: clients are told a seed, and the server's model is not that of the seed. paraaegis: the server drew the
    seed, and the clients' model is not that of the seed, yet all of them have the same."""
    homes = make_homes(tmp_path / "homes", 3)
    grid = InProcessGrid(homes)
    settings = {"dataset": "digits", "model": "mlp", "clients": 3, "rounds": 1, "lr": 1e-9, "deadline": 5.0}
    settings |= {"cipher": "pads", "share": 1.0} if scheme == "paraaegis" else {"local_steps": 1}
    serve(grid, context_of(out=str(tmp_path / "run"), scheme=scheme, **settings))
    told = Setup.parse(str(grid.sent[0].content.config_records["fedveil"]["setup"]))
    assert told.settings["secrets"] == "os"
    guess = models.build("mlp", input_shape=(1, 8, 8), outputs=10, seed=told.settings["seed"])
    guessed = torch.cat([one.detach().reshape(-1) for one in guess.parameters()])
    if scheme == "fedavg":
        found = first_model(grid.sent)
    else:
        kept = [load_file(next((home / "models").iterdir())) for home in homes]
        assert all(torch.equal(kept[0][name], one[name]) for one in kept for name in one)
        found = torch.cat([kept[0][name].reshape(-1) for name, _ in guess.named_parameters()])
    assert float((found - guessed).abs().max()) > 0.01


def test_a_worker_started_anew_goes_on_with_the_model_of_its_group(tmp_path: Path) -> None:
    """Every message meets a new process; the model that only the group knows is made again from what is sealed."""
    homes = make_homes(tmp_path / "homes", 3)

    class Forgetful(InProcessGrid):
        def _deliver(self, home: Path, parcel: bytes, *, timeout: float) -> bytes:
            return MessageHandler(home).handle(parcel)

    settings = {"dataset": "digits", "model": "mlp", "clients": 3, "rounds": 3, "cipher": "pads", "deadline": 5.0}
    out = tmp_path / "run"
    serve(Forgetful(homes), context_of(out=str(out), scheme="paraaegis", share=0.1, clip=0.01, **settings))
    assert json.loads((out / "summary.json").read_text())["rounds"] == 3
    kept = [load_file(next((home / "models").iterdir())) for home in homes]
    assert all(torch.equal(kept[0][name], one[name]) for one in kept for name in one)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        pytest.param("client = -1", "number", id="negative"),
        pytest.param("", "number", id="no number"),
        pytest.param("client = 0\nclent = 1", "Did you mean 'client'", id="a typing error"),
        pytest.param('client = "0"', "wrong kind", id="text"),
        pytest.param('client = 0\npolicy = "nowhere.toml"', "no file", id="no such policy"),
        pytest.param("client = 0\n[require]\nschem = 1", "Did you mean 'scheme'", id="an unknown requirement"),
        pytest.param("client =", "TOML", id="not TOML"),
    ],
)
def test_mistakes_in_a_clients_file_are_named(text: str, match: str, tmp_path: Path) -> None:
    (tmp_path / "client.toml").write_text(text)
    with pytest.raises(ConfigError, match=match):
        Home.read(tmp_path)
