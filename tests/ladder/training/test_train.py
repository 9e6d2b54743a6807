"""Real training of a small run, in children that are killed for real."""

import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rungwise.analysis.source import load_run
from rungwise.ladder.home import resolve_tracking
from rungwise.ladder.recording.checkpoint import Checkpoints
from rungwise.ladder.recording.tracking import is_mirrored
from rungwise.ladder.training.train import refuse_total_loss
from rungwise.ladder.trials.kill_campaign import kill_campaign

EDITS = {
    'name = "tiny"': 'name = "mini"',
    "num_layers = 3 ": "num_layers = 2 ",
    "tokens_per_active_param = ": "tokens_per_active_param = 0.8 #",
    "num_sequences = ": "num_sequences = 16 #",
}


@pytest.fixture
def mini(edited_family: Callable[..., Path]) -> Path:
    """`tiny` made shallow and short: some thirty steps on the smallest rung."""
    return edited_family(EDITS)


def _command(mini: Path, home: Path, *words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "rungwise.ladder", "run", str(mini), "--home", str(home), "--quiet", *words]


def _smallest(mini: Path) -> str:
    return f"d{tomllib.loads(mini.read_text())['rungs'][0]['hidden_dim']}"


def _final_arrays(folder: Path) -> dict[str, np.ndarray]:
    import jax

    from rungwise.ladder.family import RunConfig
    from rungwise.ladder.home import read_json
    from rungwise.ladder.training.step import init_state, state_to_tree

    config = RunConfig.model_validate(read_json(folder / "config.json")["config"])
    like = state_to_tree(jax.eval_shape(lambda: init_state(config)))
    step, tree, _ = Checkpoints(folder / "checkpoints").restore(like)
    assert step == config.steps
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def _journal_steps(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_text(errors="replace").count('"train/loss"') if path.exists() else 0


@pytest.mark.slow
def test_a_run_killed_ten_times_ends_bit_for_bit_as_if_never_killed(mini: Path, tmp_path: Path):
    campaign = kill_campaign(str(mini), _smallest(mini), kills=10, home=tmp_path, seed=1)
    assert campaign.differences == []
    assert campaign.kills.total() == 10
    assert len(campaign.kills) >= 3, "kills fall on several kinds of moment"
    assert campaign.mirrors_killed > 0
    assert campaign.to_dict()["kills"] == dict(campaign.kills)
    assert campaign.steps_repeated > 0, "a kill costs the steps since the last checkpoint"


@pytest.mark.slow
def test_a_run_that_is_asked_to_stop_saves_first_and_goes_on_from_there(mini: Path, tmp_path: Path):
    rung, home = _smallest(mini), tmp_path / "home"
    folder = home / "mini" / "runs" / rung
    child = subprocess.Popen(_command(mini, home, "--rung", rung), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while _journal_steps(folder) < 7 and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    child.send_signal(signal.SIGTERM)
    _, said = child.communicate(timeout=300)
    assert child.returncode == 143
    (attempt,) = load_run(folder).attempts
    last = int(load_run(folder).trajectory.frame["step"].to_numpy().max())
    assert said.splitlines()[-1] == f"error: asked to stop by SIGTERM, saved at step {last}; run it again to go on"
    assert (attempt.state, Checkpoints(folder / "checkpoints").latest_step()) == ("killed", last)
    subprocess.run(_command(mini, home, "--rung", rung), check=True, timeout=600)
    attempts = load_run(folder).attempts
    assert [(found.state, found.restored_step) for found in attempts] == [("killed", 0), ("finished", last)]


@pytest.mark.slow
def test_a_run_that_fails_is_code_1_and_one_line_and_the_other_runs_are_trained(mini: Path, tmp_path: Path):
    home = tmp_path / "home"
    rung = _smallest(mini)
    broken = home / "mini" / "runs" / rung
    (broken / "checkpoints").mkdir(parents=True)
    (broken / "checkpoints" / ".draft-1").touch()  # a file that no save can clear away as a draft; the last one must
    words = ("--rung", rung, "--rung", f"{rung}-seed1")
    done = subprocess.run(_command(mini, home, *words), capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert f"1 of 2 runs failed: {rung}: CheckpointFailed: checkpoint of step" in line
    assert "Traceback" not in done.stderr
    assert "Traceback" in (broken / "train.log").read_text()
    assert load_run(home / "mini" / "runs" / f"{rung}-seed1").state == "finished"
    assert load_run(broken).state == "failed"


@pytest.mark.slow
def test_store_holds_the_same_run_as_the_journal_after_a_kill(mini: Path, tmp_path: Path):
    from rungwise.analysis.source import load_run_mlflow

    rung, home = _smallest(mini), tmp_path / "home"
    folder = home / "mini" / "runs" / rung
    child = subprocess.Popen(_command(mini, home, "--rung", rung))
    deadline = time.monotonic() + 300
    while _journal_steps(folder) < 12 and time.monotonic() < deadline:
        time.sleep(0.002)
    child.kill()
    child.wait()
    subprocess.run(_command(mini, home, "--rung", rung), check=True, timeout=600)
    uri = resolve_tracking(home)
    assert is_mirrored(folder, uri)
    here, there = load_run(folder), load_run_mlflow(uri, "mini", rung)
    assert there.state == "finished"
    assert len(there.attempts) == len(here.attempts) == 2
    columns = ["step", "train/loss", "eval/loss", "progress/tokens", "moe/drop_fraction"]
    np.testing.assert_array_equal(there.trajectory.frame[columns], here.trajectory.frame[columns])


@pytest.mark.slow
def test_a_changed_definition_is_refused_with_the_fields_name(mini: Path, tmp_path: Path):
    rung, home = _smallest(mini), tmp_path / "home"
    short = mini.read_text().replace("tokens_per_active_param = 0.8", "tokens_per_active_param = 0.1")
    mini.write_text(short)
    subprocess.run(_command(mini, home, "--rung", rung), check=True, timeout=600)
    mini.write_text(short.replace("beta2 = 0.95", "beta2 = 0.99"))
    (home / "mini" / "runs" / rung / "metrics.jsonl").unlink()
    again = subprocess.run(
        _command(mini, home, "--rung", rung), capture_output=True, text=True, check=False, timeout=600
    )
    assert again.returncode == 2
    (line,) = [line for line in again.stderr.splitlines() if line.startswith("error: ")]
    assert "optimizer.beta2 (0.95, now 0.99)" in line


@pytest.mark.slow
def test_a_token_budget_beyond_the_corpus_is_refused_with_the_epochs(mini: Path, tmp_path: Path):
    text = mini.read_text().replace("tokens_per_active_param = 0.8", "tokens_per_active_param = 900")
    mini.write_text(text)
    home = tmp_path / "home"
    done = subprocess.run(
        _command(mini, home, "--rung", _smallest(mini)), capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 2
    assert "epochs" in done.stderr
    assert not (home / "mini" / "runs").exists()


def test_a_run_that_drops_every_assignment_is_stopped():
    refuse_total_loss({"moe/drop_fraction": 0.999}, step=7, transport="pooled_wave")
    with pytest.raises(RuntimeError, match=r"drop_fraction 1\.0 at step 7: transport 'pooled_wave' .*capacity factors"):
        refuse_total_loss({"moe/drop_fraction": 1.0}, step=7, transport="pooled_wave")
