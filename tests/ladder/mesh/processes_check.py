"""Trains one run in several real processes on loopback and, for comparison, in this one. Prints JSON.

`XLA_FLAGS=--xla_backend_optimization_level=0 python tests/ladder/mesh/processes_check.py 4 1`: four of one device.
"""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rungwise.analysis.points import logged_values
from rungwise.analysis.source import load_run
from rungwise.ladder.family import RunConfig, family_text, load_family
from rungwise.ladder.text.data import load_data
from rungwise.ladder.training.engine import OneDevice
from rungwise.ladder.training.schedule import horizon_of

MESH = "data=2,expert=2,optimizer=sharded"
STEPS = 4
EDITS = {
    'name = "tiny"': 'name = "mini"',
    "seq_len = 128": "seq_len = 32",
    "num_layers = 3 ": "num_layers = 1 ",
    "num_sequences = ": "num_sequences = 16 #",
    "every_fraction = 0.05": "every_fraction = 1.0",
    "every_fraction = 0.1": "every_fraction = 0.5",
    "seeds = [0, 1, 2] ": f"override = {{ steps = {STEPS} }} #",
}


def write_mini(folder: Path) -> Path:
    """One layer of `tiny`, a few steps."""
    text = family_text("tiny")
    for old, new in EDITS.items():
        assert old in text, old
        text = text.replace(old, new, 1)
    path = folder / "mini.toml"
    path.write_text(text)
    return path


def run_together(mini: Path, home: Path, *, processes: int, devices: int) -> list[tuple[int, str, str]]:
    """`ladder run` in that many processes: exit code, standard output and the end of standard error of each."""
    words = ["run", str(mini), "--rung", "d32", "--home", str(home), "--quiet", "--json", "--mesh", MESH]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
    children = []
    for index in range(processes):
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={devices}",
            "RUNGWISE_COORDINATOR": f"127.0.0.1:{port}",
            "RUNGWISE_NUM_PROCESSES": str(processes),
            "RUNGWISE_PROCESS_ID": str(index),
        }
        command = [sys.executable, "-P", "-m", "rungwise.ladder", *words]
        output, errors = (home / f"{index}.{name}" for name in ("out", "err"))
        with output.open("w") as out, errors.open("w") as err:
            children.append((subprocess.Popen(command, env=environment, stdout=out, stderr=err), output, errors))
    return [(child.wait(timeout=1500), out.read_text(), err.read_text()[-1500:]) for child, out, err in children]


def losses_alone(config: RunConfig, cache: Path) -> list[float]:
    """Training losses on one device of this process."""
    batches, engine, horizon = load_data(config, cache).batches, OneDevice(config), horizon_of(config)
    state, losses = engine.init_state(), []
    step = engine.compile_step(config, state, batches.batch(0), horizon)
    for index in range(STEPS):
        state, figures = step(state, batches.batch(index), horizon)
        losses.append(float(figures.loss.loss))
    return losses


def main() -> None:
    processes, devices = (int(word) for word in sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        mini = write_mini(home)
        ended = run_together(mini, home, processes=processes, devices=devices)
        run = home / "mini" / "runs" / "d32"
        result: dict[str, Any] = {"codes": [code for code, _, _ in ended], "outputs": [out for _, out, _ in ended]}
        result["errors"] = [err for _, _, err in ended]
        if not any(result["codes"]):
            result["losses"] = logged_values(load_run(run).trajectory, "train/loss")[1].tolist()
            result["alone"] = losses_alone(load_family(str(mini)).rung_runs[0], home / "cache")
            result["checkpoints"] = sorted(path.name for path in (run / "checkpoints").iterdir())
            result["attempts"] = (run / "metrics.jsonl").read_text().count('"kind": "attempt"')
    print(json.dumps(result))


if __name__ == "__main__":
    main()
