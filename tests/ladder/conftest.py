"""A family on disk whose runs follow a planted law: what reading verbs are tested on, without training."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rungwise.analysis.registry import register
from rungwise.ladder.family import family_text, load_family
from rungwise.ladder.home import forecasts_folder, resolve_tracking, run_folder, write_json
from rungwise.ladder.planning.plan import RunPlan, plan_ladder
from rungwise.ladder.predict import forecast_runs, load_family_runs
from rungwise.ladder.recording.journal import Journal
from rungwise.ladder.recording.tracking import journal_sizes, mark_mirrored

FLOOR, AMPLITUDE, EXPONENT = 1.2, 900.0, 0.25
"""The planted law, nats: loss = FLOOR + AMPLITUDE · FLOPs^-EXPONENT."""


def _planted_loss(flops: float) -> float:
    return FLOOR + AMPLITUDE * flops**-EXPONENT


def write_run(home: Path, family: str, plan: RunPlan, *, steps: int | None = None, shift: float = 0.0) -> None:
    """Writes a run's config and journal: a healthy curve that ends on the planted law, plus `shift` nats.

    Args:
        steps: stop here, without an end; None runs to the end.
    """
    folder = run_folder(home, family, plan.name)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", _config(family, plan))
    noise = np.random.default_rng(plan.seed + plan.hidden_dim)
    final = _planted_loss(plan.flops) * (1 + 0.002 * noise.standard_normal()) + shift
    every = max(1, plan.steps // 20)
    with Journal(folder, family=family, run=plan.name) as journal:
        journal.start_attempt(0)
        for step in range(1, (steps or plan.steps) + 1):
            values = _values(plan, step, final=final, noise=noise)
            if step % every == 0 or step == plan.steps:
                values["eval/loss"] = final + _excess(step / plan.steps)
            journal.write(step, values)
        if steps is None:
            journal.end(plan.steps, "finished")
    mark_mirrored(folder, resolve_tracking(home), journal_sizes(folder))


def _excess(progress: float) -> float:
    """Loss above the final one at this share of the run, the same for every width, nats."""
    return 0.5 * (progress**-0.5 - 1.0)


def _values(plan: RunPlan, step: int, *, final: float, noise: np.random.Generator) -> dict[str, float]:
    progress = step / plan.steps
    drops = 0.05 * np.exp(-20 * progress) + 0.002 + 0.0005 * noise.random()
    return {
        "train/loss": min(5.6, final + _excess(progress)) + 0.02 * noise.standard_normal(),
        "train/grad_norm": 0.5 + 0.05 * noise.random(),
        "moe/drop_fraction": drops,
        "moe/sender_drop_fraction": 0.4 * drops,
        "moe/receiver_drop_fraction": 0.6 * drops,
        "progress/tokens": float(step * plan.tokens_per_step),
        "progress/fraction": progress,
        "perf/tokens_per_second": 30_000.0,
    }


def _config(family: str, plan: RunPlan) -> Mapping[str, Any]:
    return {
        "family": family,
        "run": plan.name,
        "role": plan.role,
        "rung": plan.rung,
        "seed": plan.seed,
        "config_hash": f"{plan.name:0>64}",
        "corpus_hash": "c" * 64,
        "code_version": "0.1.0",
        "packages": {"jax": "0.10.2"},
        "plan": asdict(plan),
        "config": {},
    }


@pytest.fixture
def write_family_run() -> Callable[..., None]:
    """Writes a planted run of any family: `write_run`."""
    return write_run


@pytest.fixture
def rungs_home(tracked_home: Path) -> Path:
    """A home whose `tiny` rungs have finished, and their mirrors too, by what those leave in the folders."""
    for plan in plan_ladder(load_family("tiny")).rungs:
        write_run(tracked_home, "tiny", plan)
    return tracked_home


@pytest.fixture
def registered_home(rungs_home: Path) -> Path:
    """The same with a forecast registered and the family file beside it, as the runner leaves them."""
    runs = load_family_runs("tiny", home=rungs_home)
    register(forecast_runs(runs), forecasts_folder(rungs_home, "tiny"))
    (rungs_home / "tiny" / "family.toml").write_text(family_text("tiny"))
    return rungs_home


@pytest.fixture
def write_hero(home: Path) -> Callable[..., None]:
    """Writes the hero of `tiny` into the home; keywords as `write_run`, and fields of its plan to change."""

    def write(*, change: Mapping[str, Any] | None = None, **keywords: Any) -> None:
        hero = plan_ladder(load_family("tiny")).hero
        write_run(home, "tiny", replace(hero, **(change or {})), **keywords)

    return write


@pytest.fixture
def write_part(home: Path) -> Callable[..., None]:
    """Writes one named run of `tiny` afresh; keywords as `write_run`."""

    def write(name: str, **keywords: Any) -> None:
        (plan,) = (plan for plan in plan_ladder(load_family("tiny")).rungs if plan.name == name)
        shutil.rmtree(run_folder(home, "tiny", name), ignore_errors=True)
        write_run(home, "tiny", plan, **keywords)

    return write


@pytest.fixture
def planted_loss() -> Callable[[float], float]:
    """The planted law: training FLOPs → final loss, nats."""
    return _planted_loss


@dataclass
class Loopback:
    """An HTTP receiver on loopback that answers its requests in turn with `answers`, then with 200.

    An answer is a status, or a function that may first take its time. The address carries a password and a token.
    """

    SECRET = "T0PSECRET-9f2c"
    answers: list[int | Callable[[], int]]
    headers: Mapping[str, str] = field(default_factory=dict)
    requests: list[dict[str, Any]] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)
    """Keys of the messages answered with 200."""
    address: str = ""

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        body = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        key = request.headers["Idempotency-Key"]
        user = request.headers.get("Authorization")
        self.requests.append({"key": key, "body": body, "time": time.time(), "user": user})
        answer = self.answers.pop(0) if self.answers else 200
        status = answer() if callable(answer) else answer
        if status == 200:
            self.accepted.append(key)
        request.send_response(status)
        for name, value in self.headers.items():
            request.send_header(name, value)
        request.end_headers()

    @contextmanager
    def serving(self, port: int = 0) -> Iterator["Loopback"]:
        methods = {"do_POST": self.answer, "log_message": lambda *_: None}
        handler = type("Handler", (BaseHTTPRequestHandler,), {name: _method(call) for name, call in methods.items()})
        server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        self.address = f"http://me:{self.SECRET}@127.0.0.1:{server.server_port}/hooks/{self.SECRET}"
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def _method(call: Callable[..., None]) -> Callable[..., None]:
    return lambda self, *words: call(self)


@pytest.fixture
def loopback() -> Iterator[Callable[..., Loopback]]:
    """Starts an HTTP receiver with these answers; it serves until the test ends."""
    with ExitStack() as stack:
        yield lambda *answers, **headers: stack.enter_context(Loopback(list(answers), headers).serving())
