"""The watch inside a training process: the same monitor that `ladder watch` runs, fed as records are written."""

from pathlib import Path

from rungwise.analysis.source import load_run
from rungwise.ladder.console import log
from rungwise.ladder.family import RunConfig
from rungwise.ladder.home import family_folder, run_folder
from rungwise.ladder.predict import load_family_runs
from rungwise.ladder.watch import AlertFile, build_monitor


class LiveWatch:
    """Judges each record of one run; new or changed alerts go to `alerts.jsonl` and standard error."""

    def __init__(self, config: RunConfig, *, home: Path):
        runs = load_family_runs(str(family_folder(home, config.family) / "family.toml"), home=home)
        self._run = config.run
        self._file = AlertFile(run_folder(home, config.family, config.run))
        self._monitor = build_monitor(runs, config.run)
        folder = run_folder(home, config.family, config.run)
        if any(record.run == config.run for record in runs.records):
            self._monitor.extend(load_run(folder).trajectory)

    def __call__(self, step: int, values: dict[str, float]) -> None:
        """Judges one record."""
        changed = self._monitor.update({"step": step, **values})
        if changed:
            for alert in self._file.append(changed):
                log(f"{self._run} {alert.severity} {alert.rule} {alert.state}: {alert.explanation}")
