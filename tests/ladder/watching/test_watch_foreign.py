"""Any MLflow run can be watched: other names, other units, several runs in a row, none of our tags."""

import json
import time

import numpy as np
import pytest

from rungwise.analysis.reading.foreign import ForeignTail, find_runs
from rungwise.analysis.reading.metric_names import load_metric_names
from rungwise.analysis.reading.store import open_client
from rungwise.ladder.home import resolve_tracking
from rungwise.ladder.watching.watch_foreign import ForeignWatch, Watched

LN2 = 0.6931471805599453
NAMES = load_metric_names([f"train/loss=loss_bits*{LN2}", "train/grad_norm=gn"])


@pytest.fixture
def store(tracked_home):
    """A client, and what logs steps of a run: loss in bits and gradient norm under names of their own."""
    client = open_client(resolve_tracking(tracked_home))
    experiment = client.create_experiment("theirs", artifact_location=(tracked_home / "artifacts").as_uri())
    clock = iter(range(1_700_000_000_000, 1_800_000_000_000, 1000))

    def log(run_id, losses, first=0):
        from mlflow.entities import Metric

        points = []
        for step, loss in enumerate(losses, start=first):
            at = next(clock)
            points += [Metric("gn", 1.0, at, step), Metric("loss_bits", loss / LN2, at + 3, step)]
        for place in range(0, len(points), 900):
            client.log_batch(run_id, points[place : place + 900])

    def begin(name, **tags):
        return client.create_run(experiment, run_name=name, tags=tags).info.run_id

    return client, begin, log


def losses(count, *, jump_at=None, size=0.5):
    noise = np.random.default_rng(0)
    series = 3.0 + 0.01 * noise.standard_normal(count)
    if jump_at is not None:
        series[jump_at:] += size
    return list(series)


def test_foreign_run_is_judged_in_our_names_and_units(store, tracked_home):
    client, begin, log = store
    run = begin("a")
    log(run, losses(150, jump_at=100))
    client.set_terminated(run)
    watched = Watched(run_ids=(run,), metrics=NAMES, tag=True)
    verdict = ForeignWatch(watched, home=tracked_home, tracking=resolve_tracking(tracked_home), patient=False).once()
    assert verdict.state == "alert"
    first = verdict.alerts[0]
    assert (first.metric, first.since) == ("train/loss", 100)
    assert first.observed == pytest.approx(3.5, abs=0.05)
    assert any("no forecast" in remark for remark in verdict.remarks)
    page = client.get_run(run).data.tags
    assert page["rungwise.watch_state"] == "alert"
    assert page[f"rungwise.alert.{first.rule}"].startswith(first.severity)
    assert [found.path for found in client.list_artifacts(run)] == ["alerts.jsonl"]


def test_foreign_run_without_the_metric_cannot_be_judged(store, tracked_home):
    _, begin, log = store
    run = begin("a")
    log(run, losses(30))
    where = {"home": tracked_home, "tracking": resolve_tracking(tracked_home), "patient": False}
    verdict = ForeignWatch(Watched(run_ids=(run,)), **where).once()
    assert verdict.state == "cannot_judge"
    assert "a has logged none of eval/loss, train/loss yet" in verdict.remarks
    typo = ForeignWatch(Watched(run_ids=(run,), metrics=load_metric_names(["train/loss=los"])), **where).once()
    assert any("no metric 'los'" in remark for remark in typo.remarks)


def test_foreign_tail_reads_only_what_is_new_and_each_step_whole(store, tracked_home):
    _, begin, log = store
    run = begin("a")
    tail = ForeignTail(resolve_tracking(tracked_home), run, NAMES)
    log(run, losses(100))
    steps = [record["step"] for record in tail.new_records() if record["kind"] == "metrics"]
    assert tail.points_read == 200
    assert list(tail.new_records()) == []
    log(run, losses(10), first=100)
    steps += [record["step"] for record in tail.new_records() if record["kind"] == "metrics"]
    assert tail.points_read == 220
    assert set(steps) == set(range(110))


def test_foreign_run_that_goes_back_is_a_restart(store, tracked_home):
    client, begin, log = store
    run = begin("a")
    log(run, losses(40))
    log(run, losses(40)[20:], first=20)
    client.set_terminated(run)
    records = list(ForeignTail(resolve_tracking(tracked_home), run, NAMES).new_records())
    attempts = [(record["attempt"], record["step"]) for record in records if record["kind"] == "attempt"]
    assert attempts == [(1, -1), (2, 19)]
    assert records[-1]["kind"] == "end"


@pytest.mark.parametrize("how", ["tag", "ids", "names"])
def test_foreign_runs_that_continue_one_another_are_one(store, tracked_home, how):
    client, begin, log = store
    lineage = {"rungwise.lineage": "theirs/x"} if how == "tag" else {}
    first = begin("a", **lineage)
    log(first, losses(100))
    client.set_terminated(first, "FAILED")
    time.sleep(0.01)
    second = begin("b", **lineage)
    log(second, [loss + 0.08 for loss in losses(100)[60:]], first=60)
    uri = resolve_tracking(tracked_home)
    words = {"ids": {"ids": [second, first]}, "tag": {"ids": [second]},
             "names": {"experiment": "theirs", "names": ["a", "b"]}}[how]  # fmt: skip
    found = find_runs(uri, **words)
    assert found == [first, second]
    watch = ForeignWatch(Watched(run_ids=tuple(found), metrics=NAMES), home=tracked_home, tracking=uri, patient=False)
    alerts = watch.once().alerts
    assert ("resume_mismatch", 60) in [(alert.rule, alert.since) for alert in alerts]


@pytest.mark.slow
def test_foreign_watch_from_the_command_line(ladder, store, tracked_home, tmp_path):
    client, begin, log = store
    run = begin("a")
    log(run, losses(60))
    client.set_terminated(run)
    mapping = tmp_path / "names.toml"
    mapping.write_text(f'[metrics]\n"train/loss" = {{ name = "loss_bits", factor = {LN2} }}\n')
    where = ("--home", tracked_home, "--mapping", mapping, "--json")
    result = ladder("watch", "--experiment", "theirs", "--run", "a", *where)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["step"] == 59
    assert "check its name" in ladder("watch", "--experiment", "theirs", "--run", "z", *where).stderr
    refused = ladder("watch", "--run-id", run, "--metric", "train/los=x", "--home", tracked_home)
    assert (refused.returncode, "did you mean train/loss" in refused.stderr) == (2, True)


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "neither TOML nor JSON"), ('{"train/loss": 3}', "must be a name"), ("[]", "no table"),
     ('{"train/loss": {"name": "x", "factor": 0}}', "positive")],
)  # fmt: skip
def test_metric_names_refuse_a_wrong_file(tmp_path, text, said):
    file = tmp_path / "names.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=said):
        load_metric_names(file=file)


def test_metric_names_of_theirs_that_look_like_ours_give_way_to_the_mapping():
    names = load_metric_names(["train/loss=my_loss"])
    assert names.ours("my_loss") == ("train/loss", 1.0)
    assert names.ours("train/loss") is None
    assert names.ours("eval/loss") == ("eval/loss", 1.0)
    assert names.ours("lr") is None
