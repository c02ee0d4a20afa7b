"""Processes that outlive the process that started them, ports, and the folder's lock."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from tests.support.waiting import until

from tidemark.jvm.errors import FolderUnusable
from tidemark.local import folder as state_folder
from tidemark.local import ports, processes
from tidemark.local.account import SystemUser, check_reachable
from tidemark.local.errors import FolderBusy
from tidemark.local.kafka import cluster_id
from tidemark.local.processes import Signature


def mark(tmp_path):
    """A signature that no other process has."""
    return Signature(program="sleep", argument=f"0.{abs(hash(tmp_path))}")


@pytest.fixture
def sleeper(tmp_path):
    """Starts processes with the signature `mark` by `processes.spawn`. They are killed after the test."""
    pids = []

    def start():
        command = ["sleep", "100", mark(tmp_path).argument]
        pids.append(processes.spawn(command, log=tmp_path / "log", folder=tmp_path))
        until(lambda: processes.find(mark(tmp_path), pids[-1]))  # between fork and exec the process is still the shell
        return pids[-1]

    yield start
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()


def test_a_spawned_process_is_nobodys_child_and_in_another_session(sleeper):
    """It does not get the terminal's Ctrl-C, and never becomes a zombie of the process that started it."""
    pid = sleeper()
    assert os.getsid(pid) != os.getsid(0)
    assert pid not in {child.pid for child in psutil.Process().children(recursive=True)}


def test_a_process_is_found_by_its_signature_only(sleeper, tmp_path):
    """The pid is lost if the start was killed before it stored the pid. After a reboot, any process may have the pid. A program that only
    mentions the argument may be an editor or a pager that has the file open."""
    assert processes.find(mark(tmp_path), os.getpid()) is None
    other = subprocess.Popen([sys.executable, "-c", "input()", mark(tmp_path).argument], stdin=subprocess.PIPE)
    try:
        assert processes.find(mark(tmp_path), other.pid) is None
    finally:
        other.communicate(b"\n")
    pid = sleeper()
    assert processes.find(mark(tmp_path), None) == psutil.Process(pid)


def test_a_zombie_has_ended():
    """In a container without an init process, a zombie may never be reaped."""
    child = subprocess.Popen(["true"])
    process = psutil.Process(child.pid)
    assert processes.wait_gone([process], limit_s=60)
    assert not processes.alive(child.pid)
    child.wait()


def test_a_program_that_fails_is_told_in_its_own_words(tmp_path):
    def run(*command, limit_s=60.0):
        return processes.run(command, folder=tmp_path, limit_s=limit_s)

    assert run("true") is None
    assert run("sh", "-c", "echo no; exit 1") == "no\n"
    assert run("sleep", "5", limit_s=0.1) == "sleep took longer than 0.1 s and was ended"
    assert run("/nowhere/program") == "/nowhere/program cannot be run: No such file or directory"


def test_the_lines_shown_of_a_log_are_those_around_its_last_error():
    """A few lines before it are included: a broker logs much more after the relevant line, and Postgres logs the details before it."""
    log = ["INFO a", "2026 ERROR first", *["INFO b"] * 40, "2026 ERROR second", *["\tat x"] * 40]
    assert processes.relevant_lines(log).splitlines() == [*["INFO b"] * 3, "2026 ERROR second", *["\tat x"] * 8]
    assert processes.relevant_lines(["a", "b", "c"], count=2) == "b\nc"
    assert processes.relevant_lines([]) == ""


def test_a_port_with_a_listener_is_not_free_and_not_chosen():
    with socket.socket() as listener:
        listener.bind((ports.HOST, 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert (ports.is_free(port), ports.accepts(port)) == (False, True)
    assert (ports.is_free(port), ports.accepts(port)) == (True, False)
    assert ports.is_free(ports.find_free())


def test_a_cluster_id_is_never_taken_for_an_option():
    """One id in 64 would begin with a dash if all 16 bytes were random."""
    ids = {cluster_id() for _ in range(500)}
    assert (len(ids), {len(found) for found in ids}) == (500, {22})
    assert not any(found.startswith("-") for found in ids)


def test_a_second_command_on_a_folder_is_refused_at_once(tmp_path):
    """The error names the process that holds the folder. When that process has finished, the folder is free again. A reset deletes the lock
    file that it holds. A process that had opened that file must not assume that it holds the folder."""
    with state_folder.held(tmp_path):
        with pytest.raises(FolderBusy, match=f"process {os.getpid()}") as refused, state_folder.held(tmp_path):
            pass
        assert refused.value.retriable
    with state_folder.held(tmp_path):
        (tmp_path / "lock").unlink()
        with state_folder.held(tmp_path):
            assert (tmp_path / "lock").exists()


def test_only_folders_that_the_stack_makes_are_closed_to_other_users(tmp_path):
    (tmp_path / "theirs").mkdir(mode=0o770)
    before = (tmp_path / "theirs").stat().st_mode
    state_folder.make(tmp_path / "theirs")
    assert (tmp_path / "theirs").stat().st_mode == before
    state_folder.make(tmp_path / "ours")
    assert (tmp_path / "ours").stat().st_mode & 0o066 == 0
    (tmp_path / "file").touch()
    with pytest.raises(FolderUnusable, match=r"Not a directory.*TIDEMARK_STATE"):
        state_folder.make(tmp_path / "file" / "state")


if os.geteuid() == 0:  # only root starts Postgres as another user

    def test_a_folder_that_the_servers_user_may_not_pass_is_refused_with_the_command_that_helps():
        """The stack does not change the permissions of folders that it did not create."""
        nobody = SystemUser(name="nobody", uid=65534, gid=65534)
        with tempfile.TemporaryDirectory() as open_:  # other test runs of this user close the folder of `tmp_path`
            Path(open_).chmod(0o711)
            closed = Path(open_) / "closed"
            (closed / "state").mkdir(parents=True)
            closed.chmod(0o700)
            with pytest.raises(FolderUnusable, match=rf"may not enter {closed} \(mode 0700\)\. .*chmod o\+x {closed}"):
                check_reachable(nobody, Path("/"), closed / "state")
            closed.chmod(0o711)
            check_reachable(nobody, closed / "state")


def test_process_of_another_user_is_no_server_of_ours(sleeper, tmp_path, monkeypatch):
    """He can give it any name and any arguments. It would be asked, with the password."""
    pid = sleeper()
    assert processes.find(mark(tmp_path), pid).pid == pid
    monkeypatch.setattr(processes, "own_uids", lambda: {os.geteuid() + 1})
    assert processes.find(mark(tmp_path), pid) is None


def test_only_this_user_reads_the_log_of_a_server(sleeper, tmp_path):
    sleeper()
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600
