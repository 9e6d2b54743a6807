"""A real Slurm of one node on this machine, for the tests of the launcher: munged, slurmctld and slurmd, as root."""

import os
import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel", "runuser")
_CONFIG = """\
ClusterName=rungwise
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldPort={ctld}
SlurmdPort={node}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
MpiDefault=none
ReturnToService=2
KillWait=30
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _why_not() -> str | None:
    missing = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]
    if missing:
        return f"Slurm is not installed: {', '.join(missing)}"
    return None if os.geteuid() == 0 else "a Slurm of one node needs root"


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a running Slurm whose commands find it through `SLURM_CONF`."""
    if why := _why_not():
        assert "RUNGWISE_REQUIRE_SLURM" not in os.environ, why
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key, owner = folder / "munge.key", pwd.getpwnam("munge")
    key.write_bytes(os.urandom(1024))
    for path, mode in ((key, 0o400), (folder, 0o755)):
        path.chmod(mode)
    os.chown(key, owner.pw_uid, owner.pw_gid)
    config = folder / "slurm.conf"
    values = {"host": socket.gethostname().split(".")[0], "cpus": os.cpu_count(), "folder": folder}
    config.write_text(_CONFIG.format(**values, ctld=_free_port(), node=_free_port()))
    os.environ["SLURM_CONF"] = str(config)
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        munge = ["--foreground", f"--socket={folder}/munge.socket", f"--key-file={key}", f"--pid-file={folder}/m.pid"]
        for command in (["munged", "--force", *munge], ["slurmctld", "-D"], ["slurmd", "-D"]):
            log = (folder / f"{command[0]}.out").open("wb")
            daemons.append(subprocess.Popen(command, stdout=log, stderr=log, env=_environment()))
            time.sleep(0.3)
        _wait_until_idle(folder)
        yield folder
    finally:
        subprocess.run(["scancel", "--user=root"], check=False, capture_output=True)
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(timeout=30)
        del os.environ["SLURM_CONF"]


def _environment() -> dict[str, str]:
    return os.environ | {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}


def _wait_until_idle(folder: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        found = subprocess.run(["sinfo", "--noheader", "--format=%t"], capture_output=True, text=True, check=False)
        if found.stdout.strip() in ("idle", "mix"):
            return
        assert time.monotonic() < deadline, "\n".join(path.read_text()[-2000:] for path in folder.glob("*.log"))
        time.sleep(0.2)
