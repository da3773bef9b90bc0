"""Memory does not grow with clients × model: uploads are folded as they arrive."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, resource, sys
from fedveil.config import RunConfig
from fedveil.runs.job import job_from_config, settled
from fedveil.runs.loop import fresh_state, train_job

def peak():
    # VmHWM, not ru_maxrss: the latter starts at the parent's peak.
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

config = settled(RunConfig(
    scheme="pbpfl", dataset="digits", model="mlp", model_options={"depth": 2, "width": 64},
    clients=int(sys.argv[1]), partition="replacement", rounds=1, evaluate_every=0, seed=1,
))
job = job_from_config(config)
before = peak()
outcome = train_job(job, state=fresh_state(job))
print(json.dumps({
    "peak": peak(), "setup": before, "arrived": outcome.rows[0]["clients"], "parameters": job.architecture.size,
    "upload": outcome.rows[0]["bytes_up"],
}))
"""


def measure(clients: int) -> dict[str, float]:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(clients)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_ten_times_the_clients_need_hardly_more_memory() -> None:
    few, many = measure(200), measure(2_000)
    assert (few["arrived"], many["arrived"]) == (200, 2_000)
    model = 4 * few["parameters"]
    growth = many["peak"] - few["peak"]
    assert growth < 0.25 * 1_800 * model
    assert growth < 0.1 * 1_800 * few["upload"]
