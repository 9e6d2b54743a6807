"""A month of mishaps in small: real faults put into a real hero from one checkpoint on, each judged by the watch.

    python -m rungwise.ladder.trials.simulated_month tiny --home HOME --work WORK

HOME holds the family's finished rungs and a registered forecast. The hero is trained to `START` of its run; then every
case trains on from that checkpoint for `SPAN` of the run, with a fault or, as a control, with the same change declared
or none at all. Prints one row a case: what the watch said, and how many steps after the fault. Works in copies under
WORK; a case that lies there already is judged again, not trained again.
"""

import argparse
import json
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from rungwise.ladder.family import RunConfig, load_family
from rungwise.ladder.home import run_folder
from rungwise.ladder.predict import load_family_runs
from rungwise.ladder.recording.checkpoint import Checkpoints
from rungwise.ladder.recording.journal import Journal, append_event
from rungwise.ladder.recording.kept import keep_at
from rungwise.ladder.recording.provenance import write_run_config
from rungwise.ladder.text.data import load_data
from rungwise.ladder.training.actions import ActionsConfig, SkipLimits
from rungwise.ladder.training.backend import prepare_backend
from rungwise.ladder.training.preemption import Diverged, StopRun
from rungwise.ladder.training.schedule import Horizon
from rungwise.ladder.training.train import Trainer
from rungwise.ladder.watching.watch import judge_loaded

START: Final = 0.4
SPAN: Final = 0.2
CORRUPTED: Final = 0.1
"""Share of tokens that corrupted text replaces by random ones."""

Inputs = tuple[Any, np.ndarray, Horizon]
Inject = Callable[[int, Inputs], Inputs]
"""(steps since the fault began, from 1; state, tokens, horizon) → the same with the fault."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way in which a run goes on from the checkpoint."""

    name: str
    fault: bool
    """Whether the watch should speak."""
    inject: Inject = lambda _, inputs: inputs
    event: dict[str, Any] = field(default_factory=dict)
    """Declared at the step where the fault begins: kind, and what goes with it."""
    transport: dict[str, Any] = field(default_factory=dict)
    """Fields of the transport that the run has from there on, said to nobody."""
    actions: ActionsConfig | None = None
    other_text: bool = False
    """Another text from there on."""
    killed_at: float | None = None
    """Share of the span after which the run is killed once."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What the watch said of a case."""

    name: str
    fault: bool
    rule: str | None
    """Of the first warning or critical alert after the fault; None where it stayed quiet."""
    severity: str | None
    delay: int | None
    """Steps from the fault to the alert."""
    others: tuple[str, ...]
    """Further rules that spoke."""
    skipped: int
    """Updates the trainer left out."""
    loss: float
    """Mean training loss of the last 20 steps, nats."""


def cases(vocab_size: int) -> tuple[Case, ...]:
    """Faults, each with its quiet control; `healthy` is the control of those that nobody could declare."""
    rng = np.random.default_rng(0)
    bias: list[Any] = []

    def frozen(_: int, inputs: Inputs) -> Inputs:
        state, tokens, horizon = inputs
        bias.append(np.asarray(state.bias)) if not bias else None
        return state._replace(bias=jnp.array(bias[0])), tokens, horizon

    def corrupted(share: float, steps: int | None = None) -> Inject:
        def inject(since: int, inputs: Inputs) -> Inputs:
            state, tokens, horizon = inputs
            if steps is not None and since > steps:
                return inputs
            hit = rng.random(tokens.shape) < share
            return state, np.where(hit, rng.integers(0, vocab_size, tokens.shape), tokens).astype(np.int32), horizon

        return inject

    def faster(_: int, inputs: Inputs) -> Inputs:
        state, tokens, horizon = inputs
        return state, tokens, horizon._replace(peak=horizon.peak * np.float32(3.0))

    less = {"sender_capacity_factor": 0.8, "receiver_capacity_factor": 0.8}
    declared = {f"transport.{name}": value for name, value in less.items()}
    forgetting = {"kind": "mixture", "expected": {"eval/*": "up"}}  # held-out text stays the old one
    skipping = ActionsConfig(skip_nonfinite=True, skip_deviations=6.0)
    return (
        Case(name="healthy", fault=False),
        Case(name="learning rate times three", fault=True, inject=faster),
        Case(name="learning rate times three, declared", fault=False, inject=faster, event={"kind": "schedule"}),
        Case(name="router bias frozen", fault=True, inject=frozen),
        Case(name="a tenth of the text random from here on", fault=True, inject=corrupted(CORRUPTED)),
        Case(name="one random batch", fault=True, inject=corrupted(1.0, steps=1)),
        Case(name="one random batch, left out", fault=False, inject=corrupted(1.0, steps=1), actions=skipping),
        Case(name="one expert of each layer zeroed", fault=True, inject=_zeroed),
        Case(name="a weight is NaN", fault=True, inject=_poisoned),
        Case(name="capacity factors 0.8", fault=True, transport=less),
        Case(name="capacity factors 0.8, declared", fault=False, event={"kind": "transport", "change": declared}),
        Case(name="another text from here on", fault=True, other_text=True),
        Case(name="another text from here on, declared", fault=False, other_text=True, event=forgetting),
        Case(name="killed and resumed", fault=False, killed_at=0.25),
    )


def _zeroed(since: int, inputs: Inputs) -> Inputs:
    state, tokens, horizon = inputs
    if since > 1:
        return inputs
    params = jax.tree.map(lambda leaf: leaf, state.params)
    experts = params["layers"]["moe"]["experts"]
    experts["down"] = experts["down"].at[:, 0].set(0.0)
    return state._replace(params=params), tokens, horizon


def _poisoned(since: int, inputs: Inputs) -> Inputs:
    state, tokens, horizon = inputs
    if since > 1:
        return inputs
    params = dict(state.params)
    params["final_norm"] = params["final_norm"].at[0].set(jnp.nan)
    return state._replace(params=params), tokens, horizon


class FaultyEngine:
    """The run's engine with a fault between it and the trainer."""

    def __init__(self, engine: Any, case: Case, start: int) -> None:
        self._engine, self._case, self._start = engine, case, start
        self.step = start
        """Steps done."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def compile_step(self, config: RunConfig, state: Any, tokens: np.ndarray, horizon: Horizon) -> Any:
        transport = replace(config.transport, **self._case.transport)
        inner = self._engine.compile_step(config.replace(transport=transport), state, tokens, horizon)

        def step(state: Any, tokens: np.ndarray, horizon: Horizon) -> Any:
            self.step += 1
            return inner(*self._case.inject(self.step - self._start, (state, tokens, horizon)))

        return step


class OtherText:
    """Batches of another text, Python's own library, from a step on. For families whose tokens are bytes."""

    def __init__(self, batches: Any, start: int) -> None:
        self._batches, self._start = batches, start
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        self._text = np.frombuffer(b"".join(path.read_bytes() for path in files), np.uint8)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def batch(self, step: int) -> np.ndarray:
        if step < self._start:
            return self._batches.batch(step)
        length = self._batches.part_at(step).stretch.seq_len
        starts = self._batches.window_starts(step) % (len(self._text) - length - 1)
        return self._text[starts[:, None] + np.arange(length + 1)].astype(np.int32)


def simulate(family: str, *, home: Path, work: Path, names: tuple[str, ...] = ()) -> Iterator[Finding]:
    """Trains every case and judges it.

    Args:
        home: with finished rungs and a registered forecast; it is not written to.
        work: a folder for copies, with the cases trained before, if any.
        names: cases to run, all when empty.
    """
    config = load_family(family).hero_run
    start, span = round(START * config.steps), round(SPAN * config.steps)
    base = work / "base"
    if not base.exists():
        shutil.copytree(home, base, ignore=shutil.ignore_patterns("mlflow*", "hero", "checkpoints", "alerts.jsonl"))
        folder = run_folder(base, config.family, config.run)
        keep_at(folder, [start / config.steps])
        _train(config, folder, Case(name="base", fault=False), start=0, until=start, cache=home / "cache")
    start = Checkpoints(run_folder(base, config.family, config.run) / "checkpoints").steps()[-1]  # where it did stop
    for number, case in enumerate(cases(config.model.vocab_size)):
        place = work / f"case-{number}"
        if names and case.name not in names:
            continue
        if place.exists():  # trained before: judged again
            yield _finding(family, place, config, case, start)
            continue
        shutil.copytree(base, place)
        own = run_folder(place, config.family, config.run)
        if case.event:
            append_event(own, step=start + 1, **case.event)
        if case.killed_at is not None:
            until = start + round(case.killed_at * span)
            _train(config, own, case, start=start, until=until, cache=home / "cache", kill=True)
        _train(config, own, case, start=start, until=start + span, cache=home / "cache")
        yield _finding(family, place, config, case, start)


def _train(
    config: RunConfig, folder: Path, case: Case, *, start: int, until: int, cache: Path, kill: bool = False
) -> None:
    """From the last checkpoint to `until` steps, where the run saves and stops, or is cut off where `kill` is set."""
    data = load_data(config, cache)
    write_run_config(folder, config, corpus_hash=data.corpus_hash)

    def stop(step: int, values: dict[str, float]) -> None:
        if step >= until and kill:
            raise KeyboardInterrupt
        if step >= until:
            raise StopRun("the case is over")

    try:
        with Journal(folder, family=config.family, run=config.run) as journal:
            trainer = Trainer(config, folder, data, journal, (stop,))
            engine: Any = FaultyEngine(trainer.engine, case, start)
            engine.step, _ = trainer.restore()
            trainer.engine = engine
            if case.other_text:
                batches: Any = OtherText(trainer._batches, start)
                trainer._batches = batches
            if case.actions is not None:
                trainer._limits = SkipLimits(case.actions)
            trainer.train()
    except (Diverged, KeyboardInterrupt):
        pass


def _finding(family: str, home: Path, config: RunConfig, case: Case, start: int) -> Finding:
    runs = load_family_runs(family, home=home)
    verdict = judge_loaded(runs, config.run)
    frame = runs.record(config.run).trajectory.frame
    alerts = [alert for alert in verdict.alerts if alert.severity != "info" and alert.step > start]
    run_alerts = sorted((alert for alert in alerts if alert.family != "forecast_miss"), key=lambda alert: alert.step)
    first = run_alerts[0] if run_alerts else None
    skipped = np.nansum(frame["train/skipped"].to_numpy(dtype=float)) if "train/skipped" in frame else 0.0
    return Finding(
        name=case.name,
        fault=case.fault,
        rule=first.rule if first else None,
        severity=first.severity if first else None,
        delay=first.step - start if first else None,
        others=tuple(sorted({alert.rule for alert in alerts} - ({first.rule} if first else set()))),
        skipped=int(skipped),
        loss=float(np.mean(frame["train/loss"].to_numpy(dtype=float)[-20:])),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Put real faults into a real hero and see what the watch says.")
    parser.add_argument("family")
    parser.add_argument("--home", type=Path, required=True, help="with finished rungs and a registered forecast")
    parser.add_argument("--work", type=Path, required=True, help="an empty folder for copies")
    parser.add_argument("--case", action="append", default=[], help="this case alone; may be repeated")
    words = parser.parse_args()
    prepare_backend(threads=load_family(words.family).hero_run.threads, cache=words.home / "cache")
    for finding in simulate(words.family, home=words.home, work=words.work, names=tuple(words.case)):
        print(json.dumps(asdict(finding)), flush=True)
    sys.exit(0)


if __name__ == "__main__":
    main()
