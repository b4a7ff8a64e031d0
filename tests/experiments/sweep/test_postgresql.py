"""Workers on one PostgreSQL study, with a real server."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path

import optuna
import pytest
from tests.experiments.sweep import tiny
from tests.experiments.sweep.test_kill import rows, start, wait_for_lines
from tests.experiments.sweep.test_sweep import begun

from apo_experiments.sweep.database import address, open_database

pwd = pytest.importorskip("pwd", reason="needs a POSIX system")
pytest.importorskip("psycopg", reason="needs the PostgreSQL driver psycopg")
pytestmark = pytest.mark.slow


def _programs():
    """Return the folder of the server's programs, which Debian keeps off the PATH."""
    for folder in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True):
        if (folder / "initdb").exists():
            return folder
    found = shutil.which("initdb")
    return Path(found).parent if found else None


def _as_user():
    """Return how to run a program that refuses to be root, and whom its files must belong to."""
    if os.geteuid() != 0:
        return [], None
    for name in ("postgres", "nobody"):
        try:
            user = pwd.getpwnam(name)
        except KeyError:
            continue
        if shutil.which("setpriv"):
            return ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"], user
    pytest.skip("PostgreSQL does not run as root, and there is no other user")


@pytest.fixture(scope="module")
def server():
    """Start a PostgreSQL server of our own and return its address."""
    programs = _programs()
    if programs is None:
        pytest.skip("no PostgreSQL server is installed")
    prefix, user = _as_user()
    # Not pytest's own folder: another user may not enter that, and the path of a socket has 107 characters at most.
    folder = Path(tempfile.mkdtemp(prefix="apo-pg-"))
    if user is not None:
        os.chown(folder, user.pw_uid, user.pw_gid)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def command(program, *options):
        line = [*prefix, str(programs / program), "-D", str(folder / "data"), *options]
        done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr

    try:
        command("initdb", "-U", "apo", "-A", "trust", "-E", "UTF8", "--no-sync")
        settings = f"-c listen_addresses=127.0.0.1 -p {port} -k {folder} -c fsync=off"
        command("pg_ctl", "-w", "-l", str(folder / "server.log"), "-o", settings, "start")
        try:
            yield f"127.0.0.1:{port}/postgres"
        finally:
            command("pg_ctl", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def database(server):
    """Return the address of an empty database."""
    import psycopg

    name = f"study_{time.monotonic_ns()}"
    with psycopg.connect(f"postgresql://apo@{server}", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    return f"postgresql://apo@{server.rpartition('/')[0]}/{name}"


def study_trials(database):
    url = database.replace("postgresql://", "postgresql+psycopg://")
    (name,) = optuna.get_all_study_names(url)
    return optuna.load_study(study_name=name, storage=url).trials


def test_two_workers_try_every_point_exactly_once(tmp_path, database):
    machines = [tmp_path / "machine 1", tmp_path / "machine 2"]
    for machine in machines:
        machine.mkdir()
    workers = [start(machine, "--storage", database, pause=0.1) for machine in machines]
    first, second = (rows(worker) for worker in workers)
    assert first == second and len(first) == len(tiny.RATES)
    finished = [trial for trial in study_trials(database) if trial.state.name == "COMPLETE"]
    assert sorted(trial.params["lr"] for trial in finished) == list(tiny.RATES)
    counts = [begun(machine / "log") for machine in machines]
    assert counts[0] + counts[1] == dict.fromkeys(tiny.RATES, 1)
    assert all(count.total() >= 1 for count in counts)
    assert len(open_database(address(database, tmp_path)).get_all_studies()) == 1


def test_the_trial_of_a_worker_that_died_on_another_machine_is_tried_again(tmp_path, database):
    machines = [tmp_path / "machine 1", tmp_path / "machine 2"]
    for machine in machines:
        machine.mkdir()
    lost = start(machines[0], "--storage", database, pause=0.1)
    wait_for_lines(machines[0] / "log", 3, lost)
    lost.kill()
    lost.communicate()
    assert Counter(trial.state.name for trial in study_trials(database)) == {"RUNNING": 1}
    # The other machine cannot see the lock file of the first, so the silence has to tell it.
    found = rows(start(machines[1], "--storage", database, "--patience", "3"))
    assert Counter(row["outcome"] for row in found) == {"finished": 5, "diverged": 1}
    assert Counter(trial.state.name for trial in study_trials(database)) == {"COMPLETE": 6, "FAIL": 1}
    assert begun(machines[1] / "log") == dict.fromkeys(tiny.RATES, 1)
