"""Several real processes that train one run, and how they find one another."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rungwise.ladder.mesh.processes import Processes, agreed, find_processes, on_first, records_folder

CHECK = Path(__file__).with_name("processes_check.py")


@pytest.mark.slow
def test_two_processes_train_the_run_of_one_and_the_first_alone_writes_it_down():
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    command = [sys.executable, "-P", str(CHECK), "2", "2"]
    child = subprocess.run(command, capture_output=True, text=True, timeout=1800, env=environment, check=False)
    assert child.returncode == 0, child.stderr[-3000:]
    found = json.loads(child.stdout)
    assert found["codes"] == [0, 0], found["errors"]
    assert json.loads(found["outputs"][0])["family"] == "mini"
    assert found["outputs"][1] == ""
    assert found["losses"] == pytest.approx(found["alone"], rel=1e-5)
    assert found["checkpoints"] == ["2", "4"]
    assert found["attempts"] == 1


def test_a_launcher_announces_processes_by_three_variables_or_slurms_own():
    announced = {"RUNGWISE_COORDINATOR": "node1:9911", "RUNGWISE_NUM_PROCESSES": "4", "RUNGWISE_PROCESS_ID": "2"}
    assert find_processes(announced) == Processes(coordinator="node1:9911", count=4, index=2)
    slurm = {"RUNGWISE_COORDINATOR": "node1:9911", "SLURM_NTASKS": "4", "SLURM_PROCID": "3"}
    assert find_processes(slurm) == Processes(coordinator="node1:9911", count=4, index=3)
    assert find_processes({"SLURM_NTASKS": "4", "SLURM_PROCID": "3"}) is None, "four jobs of their own, not one"
    assert find_processes(announced | {"RUNGWISE_NUM_PROCESSES": "1", "RUNGWISE_PROCESS_ID": "0"}) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"RUNGWISE_PROCESS_ID": "4"}, "RUNGWISE_PROCESS_ID 4 is not within 0..3"),
        ({"RUNGWISE_NUM_PROCESSES": "many"}, "RUNGWISE_NUM_PROCESSES 'many' is no whole number"),
    ],
)
def test_a_launcher_that_announces_nonsense_is_refused(changes: dict[str, str], words: str):
    announced = {"RUNGWISE_COORDINATOR": "node1:9911", "RUNGWISE_NUM_PROCESSES": "4", "RUNGWISE_PROCESS_ID": "2"}
    with pytest.raises(ValueError, match=words):
        find_processes(announced | changes)
    with pytest.raises(ValueError, match="RUNGWISE_COORDINATOR is set but RUNGWISE_NUM_PROCESSES is not"):
        find_processes({"RUNGWISE_COORDINATOR": "node1:9911"})


def test_one_process_agrees_with_itself_and_keeps_its_records_where_the_run_is(tmp_path: Path):
    assert agreed({"step": 3}) == {"step": 3}
    with records_folder(tmp_path) as folder:
        assert folder == tmp_path

    def fail() -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match=r"^disk full$"):
        on_first(fail)
