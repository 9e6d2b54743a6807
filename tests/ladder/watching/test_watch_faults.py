"""A watch when things go wrong around it: silence, clocks, torn files, kills, outages, dead receivers, secrets."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rungwise.analysis.divergence import Monitor
from rungwise.analysis.reading.foreign import ForeignTail
from rungwise.analysis.reading.metric_names import load_metric_names
from rungwise.analysis.reading.records import read_records
from rungwise.analysis.reading.store import open_client
from rungwise.analysis.reading.tail import FolderTail, StoreTail
from rungwise.analysis.registry import register
from rungwise.analysis.vocabulary import dump_json
from rungwise.ladder.family import load_family
from rungwise.ladder.home import forecasts_folder, resolve_tracking, run_folder
from rungwise.ladder.predict import forecast_runs, load_family_runs
from rungwise.ladder.recording.journal import Journal, append_event
from rungwise.ladder.recording.tracking import mirror_folder
from rungwise.ladder.watching.alert_file import acknowledge
from rungwise.ladder.watching.delivery import Delivery
from rungwise.ladder.watching.receivers import Webhook
from rungwise.ladder.watching.watch import exit_code, judge_run, live_watch, load_watched, make_verdict
from rungwise.ladder.watching.watch_run import Watch, build_monitor


def write_journal(folder: Path, records: list[dict], *, seen_at: float) -> None:
    """A run's journal as another machine wrote it: these records, last changed at `seen_at` by the file's own clock."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [{"schema": 1, "kind": "header", "lineage": "tiny/hero"}, *records]
    (folder / "metrics.jsonl").write_text("".join(dump_json(line) + "\n" for line in lines))
    os.utime(folder / "metrics.jsonl", (seen_at, seen_at))


def start(time: float, step: int = 0, attempt: int = 1) -> dict:
    return {"kind": "attempt", "attempt": attempt, "step": step, "time": time, "host": "far"}


def rows(first: int, last: int, *, every: float = 30.0, until: float, attempt: int = 1) -> list[dict]:
    return [
        {
            "kind": "metrics",
            "attempt": attempt,
            "step": step,
            "time": until - every * (last - step),
            "values": {"train/loss": 3.0 + 0.01 * (step % 3), "train/grad_norm": 0.5},
        }
        for step in range(first, last + 1)
    ]


def look(folder: Path, now: float) -> Watch:
    """A watch of its own, as cron would start it."""
    watch = Watch("hero", Monitor(), FolderTail(folder), folder=folder, quiet=True)
    watch.catch_up()
    watch.tick(now)
    watch.finish()
    return watch


def rules(watch: Watch, state: str = "open") -> list[str]:
    return [alert.rule for alert in watch.monitor.alerts if alert.state == state]


@pytest.mark.parametrize("skew", [0.0, 7200.0, -7200.0], ids=["same clock", "ahead", "behind"])
def test_watch_of_a_silent_run_alerts_after_its_limit_once(tmp_path, skew):
    """Last point at 600 s, limit 600 s: quiet at 900, alert at 1200, the same one at 1500 and without its file."""
    write_journal(tmp_path, [start(skew), *rows(1, 20, until=600.0 + skew)], seen_at=600.0)
    assert rules(look(tmp_path, 900.0)) == []
    assert rules(look(tmp_path, 1200.0)) == ["silence"]
    assert rules(look(tmp_path, 1500.0)) == ["silence"]
    entries = [entry for entry in read_records(tmp_path / "alerts.jsonl").records if entry["kind"] == "alert"]
    assert len(entries) == 1
    (tmp_path / "alerts.jsonl").unlink()
    assert look(tmp_path, 1500.0).monitor.state == "alert"


def test_watch_of_a_run_that_goes_on_ends_its_silence(tmp_path):
    """What came late was written in time: judged again there was no silence, and the alert of before gets its end."""
    before = [start(0.0), *rows(1, 20, until=600.0)]
    write_journal(tmp_path, before, seen_at=600.0)
    look(tmp_path, 1300.0)
    write_journal(tmp_path, [*before, start(1100.0, 20, 2), *rows(21, 40, until=3000.0, attempt=2)], seen_at=3000.0)
    watch = look(tmp_path, 3010.0)
    assert watch.monitor.state == "healthy"
    last = [entry for entry in read_records(tmp_path / "alerts.jsonl").records if entry["kind"] == "alert"][-1]
    assert (last["rule"], last["state"]) == ("silence", "resolved")


def test_watch_of_a_finished_run_may_be_silent(tmp_path):
    end = {"kind": "end", "attempt": 1, "step": 20, "time": 600.0, "state": "finished"}
    write_journal(tmp_path, [start(0.0), *rows(1, 20, until=600.0), end], seen_at=600.0)
    assert look(tmp_path, 600.0 + 7200.0).monitor.alerts == []


@pytest.mark.parametrize("resumed", [False, True])
def test_watch_waits_longer_while_a_run_compiles(tmp_path, resumed):
    """Twenty-five minutes until the first step, at a start and at a restart."""
    before = [start(0.0), *rows(1, 20, until=600.0)] if resumed else []
    begun = start(700.0, 20 if resumed else 0, 2 if resumed else 1)
    write_journal(tmp_path, [*before, begun], seen_at=700.0)
    assert rules(look(tmp_path, 700.0 + 1500.0)) == []
    first = 21 if resumed else 1
    steps = rows(first, first + 20, until=700.0 + 1500.0 + 600.0, attempt=begun["attempt"])
    write_journal(tmp_path, [*before, begun, *steps], seen_at=2800.0)
    assert look(tmp_path, 2810.0).monitor.alerts == []


def test_watch_of_a_metric_that_stops_says_which(tmp_path):
    steps = rows(1, 200, until=6000.0)
    for row in steps[120:]:
        del row["values"]["train/grad_norm"]
    write_journal(tmp_path, [start(0.0), *steps], seen_at=6000.0)
    (alert,) = [alert for alert in look(tmp_path, 6010.0).monitor.alerts if alert.state == "open"]
    assert "train/grad_norm" in alert.explanation


def test_watch_that_read_no_row_never_says_healthy(tmp_path):
    write_journal(tmp_path, [start(0.0)], seen_at=0.0)
    assert look(tmp_path, 60.0).monitor.state == "cannot_judge"
    assert look(tmp_path / "nothing", 60.0).monitor.state == "cannot_judge"


def test_watch_of_a_run_with_a_nan_never_takes_it_for_a_low_loss(tmp_path):
    steps = [
        row | {"values": {"train/loss": loss}} for row, loss in zip(rows(0, 1, until=60.0), (3.5, "NaN"), strict=True)
    ]
    write_journal(tmp_path, [start(0.0), *steps], seen_at=60.0)
    (alert,) = look(tmp_path, 61.0).monitor.alerts
    assert (alert.rule, alert.step, alert.severity) == ("nonfinite", 1, "critical")
    assert "best loss so far 3.5" in alert.explanation


def test_watch_leaves_a_corrupt_line_out_and_says_so(tmp_path):
    write_journal(tmp_path, [start(0.0), *rows(1, 60, until=1800.0)], seen_at=1800.0)
    journal = tmp_path / "metrics.jsonl"
    lines = journal.read_bytes().split(b"\n")
    lines[40] = b'{"kind": "metrics", "step": \xff\xfe'
    journal.write_bytes(b"\n".join(lines))
    watch = look(tmp_path, 1801.0)
    assert (watch.monitor.state, watch.step) == ("healthy", 60)
    assert list(watch.remarks()) == ["metrics.jsonl: 1 corrupt line(s) left out (line 41)"]


def test_watch_refuses_a_forecast_of_another_model_and_judges_what_it_can(rungs_home, write_hero):
    runs = load_family_runs("tiny", home=rungs_home)
    other = {**runs.plan["hero"], "num_params": 7_000_000_000}
    elsewhere = replace(runs, plan={**runs.plan, "hero": other})
    register(forecast_runs(elsewhere), forecasts_folder(rungs_home, "tiny"))
    write_hero(steps=100)
    with Journal(run_folder(rungs_home, "tiny", "hero"), family="tiny", run="hero") as journal:
        journal.start_attempt(100)
        journal.end(100, "failed", "RuntimeError: no memory")
    verdict = judge_run(load_watched("tiny", "hero", home=rungs_home), "hero", home=rungs_home)
    assert any("forecast is for another model (num_params 7,000,000,000" in remark for remark in verdict.remarks)
    assert not [alert for alert in verdict.alerts if alert.family == "forecast_miss"]
    assert "the last attempt of hero was failed (RuntimeError: no memory)" in verdict.remarks


def test_watch_applies_a_change_declared_while_it_runs(tmp_path):
    write_journal(tmp_path, [start(0.0), *rows(1, 60, until=1800.0)], seen_at=1800.0)
    watch = look(tmp_path, 1801.0)
    append_event(tmp_path, "mixture", 61)
    higher = [row | {"values": {"train/loss": 3.6 + 0.01 * (row["step"] % 3)}} for row in rows(61, 120, until=3600.0)]
    write_journal(tmp_path, [start(0.0), *rows(1, 60, until=1800.0), *higher], seen_at=3600.0)
    watch.catch_up()
    assert "loss_level" not in [alert.rule for alert in watch.monitor.alerts]
    (tmp_path / "events.jsonl").unlink()
    assert {"loss_level", "loss_spike"} & {alert.rule for alert in look(tmp_path, 3601.0).monitor.alerts}


@pytest.mark.parametrize(
    ("loss", "answers", "code"),
    [("NaN", [], 10), ("NaN", [404], 11), (3.0, [], 0), (3.0, [404], 12)],
    ids=["told", "given up", "healthy", "healthy and one of before given up"],
)
def test_watch_exit_code_shows_a_delivery_given_up(tmp_path, loopback, loss, answers, code):
    last = rows(31, 31, until=930.0)[0] | {"values": {"train/loss": loss}}
    write_journal(tmp_path, [start(0.0), *rows(1, 30, until=900.0), last], seen_at=930.0)
    hook = Webhook("ops", loopback(*answers).address)
    delivery = Delivery("tiny/hero", tmp_path, receivers=[hook])
    if code == 12:
        message = {"what": "open", "rule": "x", "severity": "warning", "text": "t", "alert": {}, "run": "tiny/hero"}
        delivery.outbox.put("before", message, ["ops"], now=0.0)
    watch = Watch("hero", Monitor(), FolderTail(tmp_path), folder=tmp_path, delivery=delivery, quiet=True)
    watch.catch_up()
    watch.finish()
    delivery.send_for(5.0)
    verdict = make_verdict(watch, delivery, ())
    assert exit_code(verdict) == code
    assert any(remark.startswith("delivery given up: ") for remark in verdict.remarks) == (code > 10)


def test_watch_acknowledged_is_quiet_until_it_is_worse(tmp_path):
    begun = [start(0.0), *rows(1, 60, until=1800.0)]
    high = [row | {"values": {"train/loss": 3.5}} for row in rows(61, 70, until=2100.0)]
    write_journal(tmp_path, [*begun, *high], seen_at=2100.0)
    opened = look(tmp_path, 2101.0).monitor
    assert opened.state == "alert"
    with pytest.raises(ValueError, match="open are: "):
        acknowledge(tmp_path, "nonfinite")
    for rule in {alert.rule for alert in opened.alerts}:
        acknowledge(tmp_path, rule, note="known")
    known = look(tmp_path, 2102.0).monitor
    assert {alert.state for alert in known.alerts} == {"acknowledged"}
    assert known.state == "healthy"
    worse = [row | {"values": {"train/loss": 6.5}} for row in rows(71, 80, until=2400.0)]
    write_journal(tmp_path, [*begun, *high, *worse], seen_at=2400.0)
    again = look(tmp_path, 2401.0).monitor
    assert "worsening" in {alert.state for alert in again.alerts}
    assert again.state == "alert"


def follower(home: Path, address: str, *words: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-P", "-m", "rungwise.ladder", "watch", "tiny", "--follow", "--every", "0.1"]
    return subprocess.Popen(
        [*command, "--home", str(home), "--deliver-for", "5", *words],
        env=os.environ | {"RUNGWISE_WEBHOOKS": f"ops={address}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(condition, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.05)


@pytest.mark.slow
def test_watch_in_the_training_loop_tells_people_without_waiting(registered_home, write_hero, loopback, monkeypatch):
    """A process apart sends: when the step's call returns, nothing has been asked of the receiver yet."""
    write_hero(steps=100)
    receiver = loopback()
    monkeypatch.setenv("RUNGWISE_WEBHOOKS", f"ops={receiver.address}")
    observe = live_watch(load_family("tiny").hero_run, home=registered_home)
    assert observe is not None
    observe(101, {"train/loss": float("nan")})
    assert receiver.requests == []
    wait_for(lambda: receiver.accepted)
    assert receiver.accepted == ["tiny/hero/nonfinite/train/loss/101/open"]


@pytest.mark.slow
def test_watch_killed_and_started_again_loses_and_repeats_nothing(registered_home, write_hero, loopback):
    """Killed while its receiver fails; the alert of before arrives once, one that came while nobody watched too."""
    write_hero(shift=0.3)
    folder = run_folder(registered_home, "tiny", "hero")
    whole = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    cut = len(whole) * 3 // 4
    receiver = loopback(*[500] * 3)
    with Journal(folder, family="tiny", run="hero"):  # somebody writes it
        (folder / "metrics.jsonl").write_bytes(b"".join(whole[:cut]))
        first = follower(registered_home, receiver.address)
        wait_for(lambda: receiver.requests)
        first.send_signal(signal.SIGKILL)
        _, said = first.communicate()
        bad = json.loads(whole[cut])
        bad["values"]["train/loss"] = "NaN"
        (folder / "metrics.jsonl").write_bytes(
            b"".join([*whole[:cut], dump_json(bad).encode() + b"\n", *whole[cut + 1 :]])
        )
        second = follower(registered_home, receiver.address)
        out, more = second.communicate(timeout=120)
    assert second.returncode == 10, more
    keys = [key for key in receiver.accepted if key.endswith("/open")]
    assert any("nonfinite" in key for key in keys)
    assert any("forecast_miss" in key for key in keys)
    assert len(receiver.accepted) == len(set(receiver.accepted))
    entries = [entry for entry in read_records(folder / "alerts.jsonl").records if entry["kind"] == "alert"]
    marks = [(entry["rule"], entry["metric"], entry["step"], entry["state"], entry["updated"]) for entry in entries]
    assert len(marks) == len(set(marks))
    files = b"".join(path.read_bytes() for path in registered_home.rglob("*") if path.is_file())
    assert receiver.SECRET not in files.decode(errors="replace") + said + out + more


@pytest.mark.slow
def test_watch_never_shows_an_address_it_was_given(ladder, registered_home, write_hero, loopback, tmp_path):
    """Dead and refusing receivers, a traceback asked for, a report written: the secret is in no file and no line."""
    write_hero(shift=0.3)
    refusing = loopback(403)
    with socket.create_server(("127.0.0.1", 0)) as free:
        dead = f"https://{refusing.SECRET}@127.0.0.1:{free.getsockname()[1]}/{refusing.SECRET}"
    hooks = {"RUNGWISE_WEBHOOKS": f"ops={refusing.address} team={dead}", "RUNGWISE_TRACEBACK": "1"}
    where = ("--home", registered_home)
    first = ladder("watch", "tiny", "--deliver-for", "2", *where, **hooks)
    page = ladder("report", "tiny", *where, **hooks)
    broken = ladder("watch", "tiny", *where, RUNGWISE_WEBHOOKS=f"x={refusing.SECRET}", RUNGWISE_TRACEBACK="1")
    assert (first.returncode, page.returncode, broken.returncode) == (11, 0, 2)
    told = ladder("watch", "tiny", "--acknowledge", "forecast_miss", "--note", "known", "--json", *where)
    assert json.loads(told.stdout)["state"] == "acknowledged"
    said = "".join(result.stdout + result.stderr for result in (first, page, broken))
    files = b"".join(path.read_bytes() for path in registered_home.rglob("*") if path.is_file())
    assert b"ops" in files
    assert refusing.SECRET not in files.decode(errors="replace") + said


def read_as_any_run(uri: str) -> None:
    """A run of somebody else on the same server: each of its points is brought once."""
    client = open_client(uri)
    run = client.create_run(client.create_experiment("theirs")).info.run_id
    tail = ForeignTail(uri, run, load_metric_names(["train/loss=my_loss"]), patient=False)
    for begin in (0, 30):
        for step in range(begin, begin + 30):
            client.log_metric(run, "my_loss", 3.0 - 0.01 * step, step=step)
        told = [record["step"] for record in tail.new_records() if record["kind"] == "metrics"]
        assert told == list(range(begin, begin + 30))
    assert tail.points_read == 60


@pytest.mark.slow
def test_watch_survives_an_outage_of_the_server_and_reads_only_what_is_new(
    registered_home, write_hero, mlflow_server, tmp_path
):
    write_hero(shift=0.3)
    folder = run_folder(registered_home, "tiny", "hero")
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(lines[:60]))
    runs = load_family_runs("tiny", home=registered_home)
    with mlflow_server() as uri:
        with Journal(folder, family="tiny", run="hero"):
            mirror_folder(folder, uri)
        tail = StoreTail(uri, "tiny", "hero")
        watch = Watch("hero", build_monitor(runs, "hero"), tail, quiet=True)
        watch.catch_up()
        first, read = watch.num_records, tail.points_read
    with pytest.raises(ValueError, match="does not answer"):
        watch.catch_up()
    with mlflow_server() as uri:
        watch.catch_up()
        assert tail.points_read == read
        (folder / "metrics.jsonl").write_bytes(b"".join(lines))
        mirror_folder(folder, uri)
        watch.catch_up()
        read_as_any_run(uri)
    points = sum(len(json.loads(line)["values"]) for line in lines if b'"metrics"' in line[:40])
    assert tail.points_read == points
    assert first < watch.num_records
    replayed = Watch("hero", build_monitor(runs, "hero"), FolderTail(folder), quiet=True)
    replayed.catch_up()
    assert [change.alert for change in watch.told] == [change.alert for change in replayed.told]
    assert watch.num_records == replayed.num_records
    assert resolve_tracking(registered_home) != uri
