"""Watching any run in an MLflow store, whoever logged it: no family file, other metric names, several runs in a row."""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pandas as pd

from rungwise.analysis.divergence import Monitor
from rungwise.analysis.forecast import Forecast
from rungwise.analysis.reading.foreign import ForeignTail, find_runs
from rungwise.analysis.reading.metric_names import MetricNames
from rungwise.analysis.reading.records import ALERTS_FILE
from rungwise.analysis.reading.store import open_client, reading
from rungwise.analysis.reading.tail import ChainTail
from rungwise.analysis.vocabulary import TAG_FAMILY
from rungwise.ladder.console import one_line
from rungwise.ladder.home import make_folder
from rungwise.ladder.predict import load_family_runs
from rungwise.ladder.watching.delivery import Delivery
from rungwise.ladder.watching.watch import DELIVER_FOR_S, Verdict, follow, make_verdict
from rungwise.ladder.watching.watch_run import Watch
from rungwise.ladder.watching.watch_tags import write_alert_tags


@dataclass(frozen=True, kw_only=True)
class Watched:
    """Which MLflow runs to watch as one series, and what to hold them against.

    run_ids, or names within an experiment. peers: ids of finished smaller runs. family: its registered forecast and
    its rungs. tag: also write verdict and alerts to the newest of the runs in the store.
    """

    run_ids: tuple[str, ...] = ()
    experiment: str = ""
    names: tuple[str, ...] = ()
    metrics: MetricNames = field(default_factory=lambda: MetricNames({}))
    peers: tuple[str, ...] = ()
    family: str | None = None
    tag: bool = False


class ForeignWatch:
    """A watch of such runs; its state lies in `<home>/watches/<experiment>/<first run>`.

    Raises:
        ValueError: no such run, a run of another family than the forecast's, or a store that does not answer.
    """

    def __init__(self, watched: Watched, *, home: Path, tracking: str, patient: bool, keep: bool = True) -> None:
        self._watched, self._tracking = watched, tracking
        self.run_ids = find_runs(tracking, ids=watched.run_ids, experiment=watched.experiment, names=watched.names)
        with reading(tracking) as client:
            first, newest = (client.get_run(run_id) for run_id in (self.run_ids[0], self.run_ids[-1]))
            experiment = client.get_experiment(first.info.experiment_id).name
        self._check_family(newest.data.tags.get(TAG_FAMILY))
        name = first.info.run_name or first.info.run_id
        self.folder = home / "watches" / experiment.strip("/").replace("/", "_") / first.info.run_id
        self.delivery = Delivery(f"{experiment}/{name}", self.folder)
        tails = [ForeignTail(tracking, run_id, watched.metrics, patient=patient) for run_id in self.run_ids]
        self._forecast, peers = self._basis(home)
        self.watch = Watch(
            name,
            Monitor(self._forecast, peers=peers),
            tails[0] if len(tails) == 1 else ChainTail(tails),
            folder=make_folder(self.folder) if keep else None,
            delivery=self.delivery if keep else None,
            quiet=not keep,
        )
        self.tails = tails

    def once(self, *, deliver_for: float = DELIVER_FOR_S) -> Verdict:
        """Judges all there is; what is new is recorded and delivered."""
        self.watch.catch_up()
        self.watch.tick(time.time())
        self.watch.finish()
        self.delivery.send_for(deliver_for)
        return self._verdict()

    def replay(self) -> Verdict:
        """Judges from the first record as if live, writing nothing."""
        self.watch.catch_up()
        return replace(make_verdict(self.watch, None, self._remarks()), told=tuple(self.watch.told))

    def follow(self, *, every: float, give_up: float) -> Verdict:
        """Judges as the runs are written, until they have finished."""
        trouble = follow(self.watch, self.delivery, self._state, every=every, give_up=give_up)
        return self._verdict(trouble)

    def _verdict(self, trouble: str | None = None) -> Verdict:
        remarks = [*self._remarks(), *([trouble] if trouble else []), *self._write_tags()]
        return make_verdict(self.watch, self.delivery, remarks, lost=trouble is not None)

    def _state(self) -> tuple[str, str | None]:
        ended = self.watch.ended
        if ended is None or ended == "finished":
            return ("running" if ended is None else "done"), None
        return "failed", f"{self.watch.name} {ended} at step {self.watch.step}, unfinished"

    def _check_family(self, family: str | None) -> None:
        wanted = self._watched.family
        if wanted and family and family not in (wanted, Path(wanted).stem):
            raise ValueError(
                f"the run is of family {family!r}, the forecast of {wanted!r}; give its own family or none"
            )

    def _basis(self, home: Path) -> tuple[Forecast | None, pd.DataFrame | None]:
        forecast, tables = None, []
        if self._watched.family:
            runs = load_family_runs(self._watched.family, home=home)
            forecast = runs.registered
            tables = [run.trajectory.frame.assign(run=run.run) for run in runs.rungs if run.state == "finished"]
        for run_id in self._watched.peers:
            rows = ForeignTail(self._tracking, run_id, self._watched.metrics, patient=False).new_records()
            table = pd.DataFrame([{"step": row["step"], **row["values"]} for row in rows if row["kind"] == "metrics"])
            if "progress/tokens" in table:
                table["tokens"] = table["progress/tokens"]
            tables.append(table.assign(run=run_id))
        return forecast, pd.concat(tables, ignore_index=True) if tables else None

    def _remarks(self) -> Iterator[str]:
        if not self.watch.attempt:
            names = sorted({*self._watched.metrics.sources} or {"train/loss", "eval/loss"})
            yield f"{self.watch.name} has logged none of {', '.join(names)} yet"
        if self._forecast is None:
            yield "no forecast: judged against the run's own past" + (" and its peers" if self._watched.peers else "")
        elif self._watched.family:
            yield f"the forecast of {self._watched.family} is taken as the run's; its conditions cannot be checked here"
        yield from self.watch.remarks()

    def _write_tags(self) -> Iterator[str]:
        """The verdict and the alerts to the watched run's own page, where that was asked for."""
        if not self._watched.tag:
            return
        try:
            client = open_client(self._tracking)
            write_alert_tags(client, self.run_ids[-1], self.folder / ALERTS_FILE)
            with suppress(FileNotFoundError):
                client.log_artifact(self.run_ids[-1], str((self.folder / ALERTS_FILE).resolve(strict=True)))
        except Exception as error:  # what a store raises depends on the store
            yield f"verdict and alerts could not be written to the store ({one_line(error)[:200]})"


def watched_names(runs: Sequence[str]) -> tuple[str, ...]:
    """Names of runs in an experiment, as given.

    Raises:
        ValueError: there is none.
    """
    if not runs:
        raise ValueError("--experiment needs --run NAME, the name of the run in it; or give --run-id")
    return tuple(runs)
