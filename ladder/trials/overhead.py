"""What recording and judging cost a run: its step time with everything on, over that of the bare steps.

    python -m rungwise.ladder.trials.overhead tiny --home HOME --work WORK

HOME holds the family's finished rungs and a registered forecast; the hero is trained in a copy under WORK, journal,
watch and MLflow mirror on and off by turns, `PAIRS` times. Off means that the loop only waits for a step's figures,
and that the mirror is stopped. Prints the ratio of step times and, since a shared machine rarely tells that to a
percent, what it is made of: the CPU share of recording and judging, the mirror's CPU seconds, the time of checkpoints.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import time
from pathlib import Path
from typing import Any, Final

import jax

from rungwise.ladder.family import load_family
from rungwise.ladder.home import make_folder, resolve_tracking, run_folder
from rungwise.ladder.recording.journal import Journal
from rungwise.ladder.recording.provenance import write_run_config
from rungwise.ladder.recording.tracking import Mirror
from rungwise.ladder.text.data import load_data
from rungwise.ladder.training.backend import prepare_backend
from rungwise.ladder.training.train import Trainer
from rungwise.ladder.trials.alternating import Alternation
from rungwise.ladder.watching.watch import live_watch

PAIRS: Final = 20


def measure(family: str, *, home: Path, work: Path, pairs: int = PAIRS) -> dict[str, Any]:
    """Trains the hero to its end with all its companions on and off by turns.

    Args:
        home: with finished rungs and a registered forecast; it is not written to.
        work: an empty folder.
    Raises:
        ValueError: the hero has too few steps for the windows.
    """
    config = load_family(family).hero_run
    turns = Alternation.within(config.steps, pairs=pairs)
    prepare_backend(threads=config.threads, cache=work / "cache")
    shutil.copytree(home, work, ignore=shutil.ignore_patterns("hero", "checkpoints", "cache"), dirs_exist_ok=True)
    folder = make_folder(run_folder(work, config.family, config.run))
    data = load_data(config, work / "cache")
    write_run_config(folder, config, corpus_hash=data.corpus_hash)
    watcher = live_watch(config, home=work)
    assert watcher is not None
    records: list[float] = []
    saves: list[float] = []
    began = time.perf_counter()
    with (
        Mirror(folder, tracking_uri=resolve_tracking(work)) as mirror,
        Journal(folder, family=config.family, run=config.run) as journal,
    ):
        trainer = Trainer(config, folder, data, journal, (watcher,))
        record, save = trainer._record, trainer._save

        def by_turns(segment: Any, step: int, figures: Any, started: float) -> None:
            jax.block_until_ready(figures)
            if turns.is_changed(step - 1):
                start = time.thread_time()
                record(segment, step, figures, started)
                records.append(time.thread_time() - start)
            turns.seen(step)
            if turns.starts_window(step):
                mirror.process.send_signal(signal.SIGCONT if turns.is_changed(step) else signal.SIGSTOP)
                turns.forget()

        def timed_save(step: int, state: Any) -> None:
            start = time.perf_counter()
            save(step, state)
            saves.append(time.perf_counter() - start)

        trainer._record, trainer._save = by_turns, timed_save
        trainer.train()
        mirror.process.send_signal(signal.SIGCONT)
        seconds = time.perf_counter() - began
        copied = _cpu_seconds(mirror.process.pid)
    found = turns.result()
    on = found["pairs"] * turns.window * found["step_time"]["seconds_usual"]
    return found | {
        "record_cpu_share": statistics.median(records) / found["cpu_seconds"]["seconds_usual"],
        "mirror_cpu_seconds_per_second_of_steps": copied / on,
        "checkpoints": len(saves),
        "checkpoint_share_of_run": sum(saves) / seconds,
    }


def _cpu_seconds(pid: int) -> float:
    """Of a process of ours, user and system; Linux only."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what recording, judging and mirroring cost a hero.")
    parser.add_argument("family")
    parser.add_argument("--home", type=Path, required=True, help="with finished rungs and a registered forecast")
    parser.add_argument("--work", type=Path, required=True, help="an empty folder for a copy")
    parser.add_argument("--pairs", type=int, default=PAIRS, help=f"of windows with and without (default: {PAIRS})")
    words = parser.parse_args()
    home, work = words.home.absolute(), words.work.absolute()
    print(json.dumps(measure(words.family, home=home, work=work, pairs=words.pairs), indent=2))


if __name__ == "__main__":
    main()
