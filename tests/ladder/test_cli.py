"""The command line as its user meets it: real children, real exit codes, results alone on standard output."""

import json
import signal
import subprocess
import sys
import time

import pytest

from rungwise.analysis.forecast import forecast_final
from rungwise.analysis.registry import register

VERBS = (
    "plan",
    "run",
    "status",
    "forecast",
    "watch",
    "report",
    "sweep",
    "drops",
    "bench",
    "demo",
    "event",
    "cancel",
    "replan",
    "branch",
)


def refused(result) -> str:
    """The one line with which bad input is refused."""
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def test_cli_version_is_the_package_version(ladder):
    import rungwise

    assert ladder("--version").stdout.strip() == f"rungwise {rungwise.__version__}"


@pytest.mark.parametrize("verb", VERBS)
def test_cli_help_of_each_verb_shows_an_example(ladder, verb):
    result = ladder(verb, "--help")
    assert result.returncode == 0
    assert f"Example: ladder {verb}" in result.stdout


def test_cli_plan_json_has_the_promised_fields(ladder):
    result = ladder("plan", "tiny", "--json")
    plan = json.loads(result.stdout)
    assert result.stderr == ""
    assert {"family", "rungs", "hero", "ladder_flops_share"} <= set(plan)
    promised = "name hidden_dim num_layers num_params num_active_params tokens steps batch_size seq_len"
    assert {*promised.split(), "learning_rate", "flops", "flops_with_head"} <= set(plan["hero"])
    assert sum(rung["flops"] for rung in plan["rungs"]) / plan["hero"]["flops"] == plan["ladder_flops_share"]


def test_cli_plan_names_every_rung_once_a_table(ladder):
    lines = [line.split() for line in ladder("plan", "tiny").stdout.splitlines()]
    assert lines.count(["d32", "d48", "d64", "d80", "hero"]) == 3, "shapes and cost, memory, drops"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "tinny"], "tinny"),
        (["plan", "/nowhere/family.toml"], "/nowhere/family.toml"),
        (["plam", "tiny"], "plan"),
        (["plan"], "family"),
        (["plan", "tiny", "--jsn"], "--jsn"),
        (["run", "tiny", "--hero", "--rung", "d32"], "--hero"),
        (["run", "tiny", "--rung", "d33"], "d33"),
        (["forecast", "tiny"], "0 usable rungs"),
        (["report", "tiny"], "no runs"),
        (["watch", "tiny", "--once", "--follow"], "--once"),
        (["watch", "tiny", "--run", "d33"], "d33"),
        (["watch", "tiny", "--follow", "--every", "0"], "every"),
    ],
)
def test_cli_bad_input_is_one_line_and_code_2(ladder, words, said):
    assert said in refused(ladder(*words))


def test_cli_bad_family_file_is_one_line_and_code_2(ladder, tmp_path):
    path = tmp_path / "family.toml"
    path.write_text('schema = 1\nname = "mine"\nsumary = "a typo"\n')
    assert "summary" in refused(ladder("plan", path))


def test_cli_status_counts_what_is_there(ladder, rungs_home):
    result = ladder("status", "tiny", "--json", "--home", rungs_home)
    states = {run["run"]: run["state"] for run in json.loads(result.stdout)["runs"]}
    assert states.pop("hero") == "not started"
    assert set(states.values()) == {"done"}


def test_cli_forecast_json_has_the_promised_fields(ladder, rungs_home):
    result = ladder("forecast", "tiny", "--json", "--home", rungs_home)
    promised = "metric target point low high level laws status degrees_of_freedom extrapolation_ratio used refused"
    assert set(promised.split()) | {"conditions", "floor_profile", "curve", "hash"} <= set(json.loads(result.stdout))


def test_cli_register_twice_is_the_same_forecast(ladder, rungs_home):
    first, second = (ladder("forecast", "tiny", "--register", "--home", rungs_home) for _ in range(2))
    assert first.returncode == second.returncode == 0
    assert first.stderr == second.stderr
    assert len(list((rungs_home / "tiny" / "forecasts").iterdir())) == 1


def test_cli_register_other_content_is_refused(ladder, rungs_home):
    ladder("forecast", "tiny", "--register", "--home", rungs_home)
    result = ladder("forecast", "tiny", "--register", "--level", "0.5", "--home", rungs_home)
    assert "never replaced" in refused(result)


def test_cli_register_after_the_hero_started_is_refused(ladder, rungs_home, write_hero):
    write_hero(steps=10)
    assert "has started" in refused(ladder("forecast", "tiny", "--register", "--home", rungs_home))


def test_cli_changed_registered_file_is_detected(ladder, rungs_home):
    ladder("forecast", "tiny", "--register", "--home", rungs_home)
    (file,) = (rungs_home / "tiny" / "forecasts").iterdir()
    file.write_text(file.read_text().replace('"level": 0.9', '"level": 0.8'))
    assert "was changed" in refused(ladder("watch", "tiny", "--home", rungs_home))


@pytest.mark.parametrize(("shift", "code"), [(0.0, 0), (0.3, 10)], ids=["healthy", "diverged"])
def test_cli_watch_tells_a_healthy_hero_from_a_diverged_one(ladder, rungs_home, write_hero, shift, code):
    ladder("forecast", "tiny", "--register", "--home", rungs_home)
    write_hero(shift=shift)
    result = ladder("watch", "tiny", "--json", "--home", rungs_home)
    assert result.returncode == code
    verdict = json.loads(result.stdout)
    assert verdict["state"] == {0: "healthy", 10: "alert"}[code]
    fields = {
        "rule",
        "metric",
        "severity",
        "state",
        "step",
        "since",
        "observed",
        "expected",
        "explanation",
        "cost",
    }
    assert all(fields <= set(alert) for alert in verdict["alerts"])


def test_cli_watch_before_the_start_could_not_judge(ladder, rungs_home):
    result = ladder("watch", "tiny", "--json", "--home", rungs_home)
    assert result.returncode == 3
    assert json.loads(result.stdout)["state"] == "cannot_judge"


def test_cli_watch_uncaught_error_is_code_3(ladder, rungs_home, write_hero):
    write_hero(steps=30)
    alerts = rungs_home / "tiny" / "runs" / "hero" / "alerts.jsonl"
    alerts.mkdir()  # where a file belongs
    result = ladder("watch", "tiny", "--home", rungs_home)
    assert result.returncode == 3
    assert result.stderr.startswith("error: could not judge: ")


def test_cli_watch_without_a_forecast_says_what_it_lacks(ladder, rungs_home, write_hero):
    write_hero()
    result = ladder("watch", "tiny", "--home", rungs_home)
    assert result.returncode == 0
    assert "no forecast is registered" in result.stdout


@pytest.mark.parametrize(
    "words", [["forecast"], ["forecast", "--register"], ["watch"], ["watch", "--follow"], ["report"]], ids=" ".join
)
def test_cli_unreachable_tracking_server_fails_with_its_address(ladder, rungs_home, words):
    address = "http://127.0.0.1:9"
    result = ladder(*words, "tiny", "--home", rungs_home, "--tracking", f"http://me:secret@{address[7:]}")
    assert f"'{address}' does not answer" in refused(result)


def test_cli_watch_gives_up_a_dead_hero_with_code_3(ladder, rungs_home, write_hero):
    write_hero(steps=40)
    result = ladder("watch", "tiny", "--follow", "--give-up", "0", "--json", "--home", rungs_home)
    assert result.returncode == 3
    assert json.loads(result.stdout)["state"] == "cannot_judge"
    assert "hero stopped at step 40" in result.stderr


def test_cli_watch_own_error_is_code_3_whatever_its_kind(ladder, home, write_hero, planted_loss):
    rows = [{"flops": flops, "loss": planted_loss(flops)} for flops in (1e10, 3e10, 1e11, 3e11)]
    register(forecast_final(rows, {"flops": 1e12, "vocab_size": "many"}), home / "tiny" / "forecasts")
    write_hero(steps=30)
    result = ladder("watch", "tiny", "--home", home)
    assert result.returncode == 3
    assert result.stderr.startswith("error: could not judge: ValueError: ")


def test_cli_interrupt_is_code_130(rungs_home):
    command = [
        sys.executable,
        "-P",
        "-m",
        "rungwise.ladder",
        "watch",
        "tiny",
        "--follow",
        "--home",
        str(rungs_home),
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        assert "waiting" in child.stderr.readline()
        time.sleep(0.2)
        child.send_signal(signal.SIGINT)
        try:
            assert child.wait(timeout=30) == 130
        finally:
            child.kill()  # else leaving the block waits for a child that did not listen
