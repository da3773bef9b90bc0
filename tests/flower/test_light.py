"""What is imported where: the thin side stays thin, and a missing extra is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "numpy", "scipy", "sklearn")


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600)


def test_the_client_app_is_loaded_without_torch() -> None:
    code = (
        "import sys\n"
        "from fedveil.flower import client_app\n"
        "import fedveil.flower.client_app\n"
        "import flwr.clientapp\n"
        f"print([one for one in {HEAVY!r} if one in sys.modules and one != 'numpy'])"
    )
    done = python(code)
    assert done.stdout.strip() == "[]", done.stderr


def test_neither_a_worker_nor_the_server_loads_statistics_that_only_audits_need() -> None:
    """scipy.stats is a third of what loading FedVeil takes, in time and memory, for every client of a machine."""
    code = (
        "import sys\n"
        "import fedveil.flower.message_handler, fedveil.flower.server_app\n"
        "print('scipy.stats' in sys.modules)"
    )
    done = python(code)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize("name", ["server_app", "client_app"])
def test_without_flower_the_extra_is_named(name: str) -> None:
    done = python(f"import sys; sys.modules['flwr'] = None\nfrom fedveil.flower import {name}")
    assert done.returncode
    assert "pip install 'fedveil[flower]'" in done.stderr


def test_the_command_line_names_it_too(tmp_path: Path) -> None:
    code = (
        "import sys, os; sys.modules['flwr'] = None\n"
        f"os.chdir({str(tmp_path)!r})\n"
        "from fedveil.cli import main\n"
        "for command in (['up', '--as-root'], ['run', 'app']):\n"
        "    sys.argv = ['fedveil', 'flower', *command]\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit as stop:\n"
        "        print(stop.code)\n"
    )
    (tmp_path / "app").mkdir()
    done = python(code)
    assert done.stdout.split() == ["8", "8"], done.stderr
    assert done.stderr.count("pip install 'fedveil[flower]'") == 2


def test_flower_finds_both_apps_without_running_anything() -> None:
    from flwr.supercore import object_ref

    for name in ("server_app", "client_app"):
        assert object_ref.validate(f"fedveil.flower:{name}", check_module=True) == (True, None)
