"""A run of several attempts and names is one series: repeated steps are compared, not added up."""

from pathlib import Path

import pytest

from rungwise.analysis.divergence import Monitor
from rungwise.analysis.reading.tail import ChainTail, FolderTail, StoreTail
from rungwise.analysis.source import load_run
from rungwise.ladder.home import resolve_tracking, run_folder, write_json
from rungwise.ladder.recording.journal import Journal
from rungwise.ladder.recording.tracking import mirror_folder
from rungwise.ladder.watching.watch_run import Watch


@pytest.fixture
def write(tracked_home):
    """Appends an attempt to a run: steps and their losses, after a restored step."""

    def call(run, restored, losses, *, end=None) -> Path:
        folder = run_folder(tracked_home, "tiny", run)
        folder.mkdir(parents=True, exist_ok=True)
        head = {"family": "tiny", "run": run, "role": "hero", "rung": run, "seed": 0, "config_hash": "c0ffee"}
        write_json(folder / "config.json", head | {"plan": {}, "config": {}})
        with Journal(folder, family="tiny", run=run) as journal:
            journal.start_attempt(restored)
            for step, values in losses:
                journal.write(step, values if isinstance(values, dict) else {"train/loss": values})
            if end:
                journal.end(0, end)
        return folder

    return call


def line(first: int, last: int, *, shift: float = 0.0):
    return [(step, 3 - 0.006 * step + shift) for step in range(first, last + 1)]


def judged(tail) -> Watch:
    watch = Watch("hero", Monitor(), tail, quiet=True)
    watch.catch_up()
    return watch


@pytest.mark.parametrize("reader", ["folder", "store"])
def test_watch_of_a_restart_that_repeats_its_losses_is_quiet(write, tracked_home, reader):
    """At step 80 both attempts have 2.520; against the last five of attempt 1 that would be 10.8 deviations."""
    write("hero", 59, line(60, 99))
    folder = write("hero", 79, line(80, 120))
    uri = resolve_tracking(tracked_home)
    if reader == "store":
        mirror_folder(folder, uri)
    watch = judged(FolderTail(folder) if reader == "folder" else StoreTail(uri, "tiny", "hero"))
    assert watch.monitor.alerts == []
    assert (watch.step, watch.num_records) == (120, 81)


@pytest.mark.parametrize("reader", ["folder", "store", "renamed"])
def test_watch_of_a_restart_that_does_not_match_says_where_and_by_how_much(write, tracked_home, reader):
    first = write("hero", 59, line(60, 99))
    again = "hero-again" if reader == "renamed" else "hero"
    folder = write(again, 79, line(80, 120, shift=0.08))
    uri = resolve_tracking(tracked_home)
    if reader == "store":
        mirror_folder(folder, uri)
    tails = {"folder": lambda: FolderTail(folder), "store": lambda: StoreTail(uri, "tiny", "hero"),
             "renamed": lambda: ChainTail([FolderTail(first), FolderTail(folder)])}  # fmt: skip
    (alert,) = judged(tails[reader]()).monitor.alerts
    assert (alert.rule, alert.since) == ("resume_mismatch", 80)
    assert "from step 80 on, the loss is +0.08 nats off" in alert.explanation


def test_watch_follows_the_live_attempt_and_not_the_highest_step(write):
    """A restart repeats steps 10 to 15; after step 12 a mis-numbered evaluation is written at step 100,000."""
    write("hero", -1, [(step, 3 - 0.01 * step) for step in range(16)])
    again = [(step, 3 - 0.01 * step + 0.002) for step in range(10, 20)]
    stray = [(100_000, {"eval/loss": 2.9})]
    folder = write("hero", 9, [*again[:3], *stray, *again[3:4]])
    watch = judged(FolderTail(folder))
    assert watch.step == 13
    assert load_run(folder).trajectory.latest("train/loss") == pytest.approx(2.872)
    with Journal(folder, family="tiny", run="hero") as journal:
        journal.start_attempt(13)
        for step, loss in again[4:]:
            journal.write(step, {"train/loss": loss})
    watch.catch_up()
    series = load_run(folder).trajectory.series("train/loss")
    assert (watch.step, len(series)) == (19, 20)
    assert (series[9], series[12], series[19]) == pytest.approx((2.91, 2.882, 2.812))
    assert series.mean() == pytest.approx(2.906)
    assert watch.monitor.alerts == []


def test_watch_of_renamed_runs_ignores_what_a_dead_one_still_writes(write):
    first, second = write("hero", 0, line(1, 50)), write("hero-2", 40, line(41, 80))
    watch = judged(ChainTail([FolderTail(first), FolderTail(second)]))
    assert watch.step == 80
    write("hero", 50, [(51, 9.0)])
    watch.catch_up()
    assert (watch.step, watch.monitor.alerts) == (80, [])


def test_watch_reads_each_record_once_however_often_it_looks(write):
    folder = write("hero", 0, line(1, 200))
    tail = FolderTail(folder)
    counts = [sum(1 for _ in tail.new_records())]
    for start in (201, 231):
        write("hero", start - 1, line(start, start + 29))
        counts.append(sum(1 for _ in tail.new_records()))
    assert counts == [201, 31, 31]


def test_watch_of_chunks_and_of_all_at_once_tell_the_same(write):
    """Live, a look a step; replayed, one look: the same changes at the same steps."""
    losses = line(1, 150) + [(step, 2.9 + 0.002 * step) for step in range(151, 260)]
    folder, live = None, None
    for start in range(0, len(losses), 23):
        folder = write("hero", losses[start][0] - 1, losses[start : start + 23])
        live = live or Watch("hero", Monitor(), FolderTail(folder), quiet=True)
        live.catch_up()
    assert folder is not None
    assert live is not None
    replayed = judged(FolderTail(folder))
    assert live.told
    assert [change.alert for change in live.told] == [change.alert for change in replayed.told]
