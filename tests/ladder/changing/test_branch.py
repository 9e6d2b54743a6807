"""Branches, their weights, and courses that change, on a family small enough to train here."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rungwise.analysis.source import load_run
from rungwise.ladder.changing.branch import begin_branch, branch_config, load_course, load_run_config
from rungwise.ladder.changing.cooldown import Cooldown, parse_cooldowns, parse_shares
from rungwise.ladder.changing.course import course_of, learning_rate_at, plan_course, stretches_of_course
from rungwise.ladder.changing.declare import declare_change
from rungwise.ladder.family import load_family
from rungwise.ladder.home import run_folder
from rungwise.ladder.launching.status import family_status
from rungwise.ladder.recording.checkpoint import Checkpoints
from rungwise.ladder.recording.export import WEIGHTS_FILE, export_weights, load_exported
from rungwise.ladder.recording.journal import append_event
from rungwise.ladder.recording.kept import keep_at, kept_fractions, kept_steps
from rungwise.ladder.recording.provenance import write_run_config

HERO = load_family("tiny").hero_run
EDITS = {
    'name = "tiny"': 'name = "small"',
    "seq_len = 128": "seq_len = 32",
    "num_layers = 3 ": "num_layers = 1 ",
    "num_experts = 32 ": "num_experts = 8 ",
    "tokens_per_active_param = 10": "tokens_per_active_param = 4",
    "num_sequences = ": "num_sequences = 16 #",
    "keep = 2": "keep = 20",
    "every_fraction = 0.1": "every_fraction = 0.2",
    "every_fraction = 0.05": "every_fraction = 0.2",
}


@pytest.fixture
def small(edited_family: Callable[..., Path]) -> Path:
    """`tiny` in a few seconds: one layer, eight experts, some 170 steps on the smallest rung."""
    return edited_family(EDITS)


def _parent(home: Path, *steps: int) -> Path:
    """The hero of `tiny` with checkpoints at these steps, as files: what is in them does not matter here."""
    folder = run_folder(home, "tiny", "hero")
    folder.mkdir(parents=True)
    write_run_config(folder, HERO, corpus_hash="c" * 64)
    for step in steps:
        Checkpoints(folder / "checkpoints", keep=9).save(step, {"x": np.full(3, step)}, meta={"step": step})
    return folder


def test_a_branch_decays_from_the_parents_rate_to_the_final_one(home: Path):
    folder = _parent(home, 370)
    course = load_course(folder)
    branch = branch_config(HERO, course, step=370, name="early", tokens=123 * HERO.tokens_per_step)
    own = course_of(branch)
    assert (branch.role, branch.rung, branch.steps) == ("branch", "hero", 493)
    assert branch.content_hash != HERO.content_hash
    assert branch.start is not None
    assert (branch.start.parent, branch.start.parent_hash) == ("hero", HERO.content_hash)
    assert [(part.first_step, part.last_step) for part in own] == [(370, 493)]
    slope = (learning_rate_at(course, 370) - 0.05 * HERO.learning_rate) / 123
    assert learning_rate_at(own, 371) == pytest.approx(learning_rate_at(course, 370) - slope, rel=1e-9)
    assert learning_rate_at(own, 493) == pytest.approx(0.05 * HERO.learning_rate)
    assert plan_course(own).tokens == 493 * HERO.tokens_per_step
    assert plan_course(own).flops == pytest.approx(plan_course(course).flops * 493 / HERO.steps, rel=1e-9)
    assert stretches_of_course(own)[0] == stretches_of_course(course)[0]


def test_a_branch_may_have_a_longer_context_and_keeps_its_tokens(home: Path):
    wide = HERO.replace(sequences_per_rank=4)
    branch = branch_config(wide, course_of(wide), step=370, name="long", seq_len=512)
    (part,) = course_of(branch)
    assert (part.config.model.seq_len, part.config.sequences_per_rank) == (512, 1)
    assert part.config.tokens_per_step == wide.tokens_per_step
    with pytest.raises(ValueError, match="seq_len 96 does not divide the 512 tokens of a rank"):
        branch_config(wide, course_of(wide), step=370, name="long", seq_len=96)


def test_a_branch_copies_a_checkpoint_and_touches_nothing_of_its_parent(home: Path):
    folder = _parent(home, 247, 370)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    branch = branch_config(HERO, load_course(folder), step=370, name="early")
    place = begin_branch(folder, branch)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert Checkpoints(place / "checkpoints").steps() == (370,)
    assert load_run_config(place) == branch
    assert begin_branch(folder, branch) == place
    with pytest.raises(ValueError, match=r"branch early is there with another steps \(493, now 419\)"):
        begin_branch(folder, branch_config(HERO, load_course(folder), step=370, name="early", tokens=200_000))
    with pytest.raises(ValueError, match=r"no checkpoint at step 300 \(it has: 247, 370\)"):
        begin_branch(folder, branch_config(HERO, load_course(folder), step=300, name="other"))
    with pytest.raises(ValueError, match="step 1235 is outside run hero, steps 1 to 1234"):
        branch_config(HERO, load_course(folder), step=1235, name="late")


def test_cooldowns_are_named_by_their_shares():
    first, second = parse_cooldowns("0.4, 0.2-0.6")
    assert (first, second) == (Cooldown(0.4, 0.5), Cooldown(0.2, 0.6))
    assert (first.name("d64"), second.name("d64")) == ("d64-cooldown40", "d64-cooldown20to60")
    for wrong in ("", "0.4,", "0.6-0.2", "1.2", "x"):
        with pytest.raises(ValueError, match="--cooldowns"):
            parse_cooldowns(wrong)
    with pytest.raises(ValueError, match=r"--keep-at '0\.3,2'"):
        parse_shares("--keep-at", "0.3,2")


def test_checkpoints_that_were_asked_for_are_kept_for_good(home: Path):
    folder = _parent(home)
    keep_at(folder, [0.3, 0.2])
    keep_at(folder, [0.3])
    assert kept_fractions(folder) == [0.2, 0.3]
    kept = kept_steps(folder, load_course(folder))
    assert kept == {247, 370}
    checkpoints = Checkpoints(folder / "checkpoints", keep=1, kept=kept)
    for step in (123, 247, 494, 617):
        checkpoints.save(step, {"x": np.zeros(2)}, meta={})
    assert checkpoints.steps() == (247, 617)


def _ladder(small: Path, home: Path, verb: str, *words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "rungwise.ladder", verb, str(small), "--home", str(home), *words]


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _tree(folder: Path, step: int) -> dict[str, Any]:
    import jax

    from rungwise.ladder.training.step import init_state, state_to_tree

    config = load_run_config(folder)
    like = state_to_tree(jax.eval_shape(lambda: init_state(config)))
    return Checkpoints(folder / "checkpoints").restore(like, step)[1]


def _assert_equal(left: Any, right: Any) -> None:
    import jax

    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.mark.slow
def test_a_declared_change_a_branch_and_a_kill_on_a_real_run(small: Path, tmp_path: Path):
    """One run changed on the way and killed ends as the same run unkilled; one branched from, as never branched."""
    calm, stormy = tmp_path / "calm", tmp_path / "stormy"
    rung = load_family(str(small)).rung_runs[0]
    changed = round(0.2 * rung.steps)
    change = {"steps": round(0.6 * rung.steps)}
    for home in (calm, stormy):
        folder = run_folder(home, "small", rung.run)
        folder.mkdir(parents=True)
        append_event(folder, "schedule", changed + 1, change=change, reason="less time")
    quiet = ("--rung", rung.run, "--quiet")
    _call(*_ladder(small, calm, "run", *quiet))
    folder = run_folder(stormy, "small", rung.run)
    child = subprocess.Popen(_ladder(small, stormy, "run", *quiet), stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and child.poll() is None:
        written = (folder / "metrics.jsonl").read_text() if (folder / "metrics.jsonl").exists() else ""
        if written.count('"train/loss"') > changed + 1:
            break
        time.sleep(0.002)
    assert child.poll() is None, "the run ended before it could be killed"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    at = Checkpoints(folder / "checkpoints").latest_step()
    _call(*_ladder(small, stormy, "branch", "--run", rung.run, "--at", str(at), "--quiet"))
    _call(*_ladder(small, stormy, "run", *quiet))

    expected = run_folder(calm, "small", rung.run)
    last = change["steps"]
    assert Checkpoints(folder / "checkpoints").steps()[-1] == last
    _assert_equal(_tree(folder, last), _tree(expected, last))
    frame, whole = load_run(folder).trajectory.frame, load_run(expected).trajectory.frame
    np.testing.assert_array_equal(frame["train/loss"], whole["train/loss"])
    np.testing.assert_array_equal(frame["train/learning_rate"], whole["train/learning_rate"])
    rates = whole["train/learning_rate"].to_numpy(float)
    course = load_course(expected)
    np.testing.assert_allclose(rates, [learning_rate_at(course, step + 1) for step in range(last)], rtol=1e-5)
    assert rates[-1] == pytest.approx(0.05 * rung.learning_rate)
    assert whole["progress/fraction"].iloc[-1] == 1.0
    assert load_run(expected).plan["steps"] == last
    assert [event["step"] for event in load_run(folder).events if event["kind"] == "schedule"] == [changed + 1]


@pytest.mark.slow
def test_qualification_export_and_a_change_that_came_too_late(small: Path, tmp_path: Path):
    home, rung = tmp_path / "home", load_family(str(small)).rung_runs[0]
    said = json.loads(
        _call(*_ladder(small, home, "run", "--rung", rung.run, "--steps", "6", "--engineering", "--json"))
    )
    assert said["run"] == f"{rung.run}-engineering"
    assert "engineering only" in said["stamp"]
    assert (said["measured_steps"], said["tokens_per_second"] > 0, said["memory_bytes"] > 1e8) == (4, True, True)
    assert 0 < said["drop_fraction"] < 1
    record = load_run(run_folder(home, "small", said["run"]))
    assert (record.role, record.state, len(record.trajectory.frame)) == ("engineering", "finished", 6)
    status = family_status(str(small), home=home)["runs"]
    assert [run["role"] for run in status if run["run"] == said["run"]] == ["engineering"]

    _call(*_ladder(small, home, "run", "--rung", rung.run, "--cooldowns", "0.3", "--quiet"))
    branch = run_folder(home, "small", f"{rung.run}-cooldown30")
    own = load_run_config(branch)
    assert (own.role, own.start.parent if own.start else None) == ("branch", rung.run)
    assert load_run(branch).trajectory.frame["train/learning_rate"].iloc[-1] == pytest.approx(0.05 * rung.learning_rate)
    parent = run_folder(home, "small", rung.run)
    export_weights(branch, tmp_path / "weights")
    model, params, bias = load_exported(tmp_path / "weights")
    tree = _tree(branch, own.steps)
    assert model == own.model
    _assert_equal(params, tree["params"])
    np.testing.assert_array_equal(_logits(model, params, bias), _logits(own.model, tree["params"], tree["bias"]))
    file = tmp_path / "weights" / WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        load_exported(tmp_path / "weights")

    with pytest.raises(ValueError, match="has finished"):
        declare_change(parent, "transport", {"transport.name": "ragged"}, reason="drops")


def _logits(model: Any, params: Any, bias: Any) -> np.ndarray:
    import jax

    from rungwise.model.methods import build_method, dropless_config
    from rungwise.model.transformer import forward

    tokens = np.random.default_rng(0).integers(0, 256, (2, model.seq_len)).astype(np.int32)
    method = build_method(dropless_config(model.num_experts, model.top_k, num_ranks=1))
    return np.asarray(jax.jit(lambda *given: forward(*given, config=model, method=method).logits)(params, bias, tokens))
