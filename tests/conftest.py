"""What all tests share: a quiet environment, the same examples each time, a home, slow tests last, no silent skips."""

import contextlib
import fnmatch
import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import settings

_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rungwise-tests"
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": str(_CACHE / "jax-{}.{}".format(*sys.version_info)),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MPLBACKEND": "agg",
}
for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
for _name in ("RUNGWISE_HOME", "MLFLOW_TRACKING_URI"):
    os.environ.pop(_name, None)

# A shell that starts the tests in the background has interrupts ignored, and children would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("rungwise", deadline=None, derandomize=True)
settings.load_profile("rungwise")

_ALLOWED_SKIPS = Path(__file__).with_name("allowed_skips.txt")
_skipped = pytest.StashKey[list[str]]()


_MAPPED_REGIONS = Path("/proc/self/maps")
_MANY_REGIONS = 20_000


@pytest.fixture(autouse=True)
def _bounded_memory_maps() -> Iterator[None]:
    """Forgets compiled programs before their mapped regions reach Linux's limit of 65,530, where a process crashes."""
    yield
    if (jax := sys.modules.get("jax")) is None or not _MAPPED_REGIONS.exists():
        return
    if _MAPPED_REGIONS.read_bytes().count(b"\n") > _MANY_REGIONS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """An empty home folder."""
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


@pytest.fixture(scope="session")
def _empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rungwise.analysis.reading.store import open_client

    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    open_client(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def tracked_home(home: Path, _empty_store: Path) -> Path:
    """A home folder whose MLflow store has its tables already: making them takes seconds."""
    shutil.copy(_empty_store, home)
    return home


@contextlib.contextmanager
def _serve(folder: Path, port: int) -> Iterator[str]:
    store = [
        "--backend-store-uri",
        f"sqlite:///{folder}/server.db",
        "--artifacts-destination",
        str(folder / "artifacts"),
    ]
    where = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command = [sys.executable, "-m", "mlflow", "server", *store, *where]
    log = (folder / "server.log").open("a")
    server = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)
    try:
        uri = f"http://127.0.0.1:{port}"

        deadline = time.monotonic() + 120
        while not _answers(uri):
            assert server.poll() is None, (folder / "server.log").read_text()
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.1)
        yield uri
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        log.close()


def _answers(uri: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{uri}/health", timeout=1):
        return True
    return False


@pytest.fixture
def mlflow_server(tmp_path: Path) -> Callable[[], contextlib.AbstractContextManager[str]]:
    """Starts a real tracking server on loopback, each time the same one; its address holds inside the `with`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return lambda: _serve(tmp_path, port)


@pytest.fixture
def ladder(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `ladder WORD…` as a child in an empty folder; returns its exit code and both outputs."""

    def call(*words: str | Path, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "rungwise.ladder", *map(str, words)]
        return subprocess.run(
            command,
            cwd=tmp_path,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return call


@pytest.fixture
def edited_family(tmp_path: Path) -> Callable[..., Path]:
    """Writes a shipped family with pieces of its text replaced, each once and each found; returns the file, named
    after the family."""

    def write(
        edits: Mapping[str, str], *, family: str = "tiny", then: Callable[[str], str] = lambda text: text
    ) -> Path:
        from rungwise.ladder.family import family_text

        text = family_text(family)
        for old, new in edits.items():
            assert old in text, old
            text = text.replace(old, new, 1)
        text = then(text)
        path = tmp_path / f"{tomllib.loads(text)['name']}.toml"
        path.write_text(text)
        return path

    return write


@pytest.fixture(scope="session")
def on_eight_devices() -> Callable[..., str]:
    """Runs a script as a child that sees eight CPU devices, since a process fixes their number; returns what it
    printed. Slow neighbours do not end its collectives."""

    def run(script: Path, *words: str, flags: str = "", timeout: float = 1500) -> str:
        patience = [f"--xla_cpu_collective_call_{kind}_timeout_seconds=600" for kind in ("warn_stuck", "terminate")]
        devices = " ".join(["--xla_force_host_platform_device_count=8", *patience, flags])
        child = subprocess.run(
            [sys.executable, str(script), *words],
            env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": devices},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert child.returncode == 0, child.stderr[-3000:]
        return child.stdout

    return run


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--strict-skips", action="store_true", help=f"fail on a skip not in {_ALLOWED_SKIPS.name}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_SkipsSeen(config.stash.setdefault(_skipped, [])))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


class _SkipsSeen:
    """Hears of every skip, of a test or of a whole file, also of those that another process reports."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._hear(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._hear(report)

    def _hear(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped:
            self._lines.append(_skip_line(report))


def _skip_line(report: pytest.TestReport | pytest.CollectReport) -> str:
    """`node id: reason`, what the allow-list's patterns are held against."""
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return f"{report.nodeid}: {reason.removeprefix('Skipped: ')}"


def _unlisted_skips(config: pytest.Config) -> list[str]:
    if not config.getoption("--strict-skips"):
        return []
    lines = (line.strip() for line in _ALLOWED_SKIPS.read_text().splitlines())
    allowed = [line for line in lines if line and not line.startswith("#")]
    skips = config.stash[_skipped]
    return [skip for skip in skips if not any(fnmatch.fnmatchcase(skip, pattern) for pattern in allowed)]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _unlisted_skips(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for skip in _unlisted_skips(config):
        terminalreporter.line(f"SKIP NOT ALLOWED {skip}", red=True)
