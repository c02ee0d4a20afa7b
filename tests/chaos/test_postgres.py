"""Postgres is struck at each step in turn: a session is terminated, a process is killed, or the whole server is stopped immediately."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
from tests.chaos.feed import SPARK_TRANSFORM
from tests.chaos.postgres_server import COMMIT_SESSIONS, DRIVER_SESSIONS, PostgresServer
from tests.chaos.trial import Trial, committed_before
from tests.support.sampling import dealt
from tests.support.spark_here import run_here, spark_session
from tests.support.waiting import until

from tidemark.errors import DatabaseUnavailable, Unavailable
from tidemark.sink.steps import Step

Strike = Callable[[PostgresServer, int], None]
STRIKES: dict[str, Strike] = {
    "session-terminated": PostgresServer.terminate,
    "backend-killed": PostgresServer.kill,
    "server-stopped-immediately": PostgresServer.stop,
}
STAGED = ["session-terminated", "server-stopped-immediately"]

SHUFFLED = SPARK_TRANSFORM.rstrip() + ".repartition(2)\n"


@pytest.fixture
def seed(pytestconfig: pytest.Config) -> int:
    """The seed of the test run, which distributes the steps among the strikes."""
    return int(pytestconfig.getoption("randomly_seed", 0))


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Spark session in this process, for the whole module."""
    with spark_session(tmp_path_factory.mktemp("transforms")):
        yield


def strike_each(steps: Sequence[Step], chaos: Trial, server: PostgresServer, strike: Strike) -> None:
    """The run fails as unavailable. The next try loads the rest, or finds that nothing is left to load."""
    for step in steps:
        with chaos.held_here(step) as held:
            # before ⑦, the session of the commit is already closed, and only that of the driver is left
            strike(server, server.backend(DRIVER_SESSIONS if step is Step.RECEIPT else COMMIT_SESSIONS))
            held.point.release()
            server.up()
            assert isinstance(held.run.exception(180), Unavailable), step
        chaos.check_stored(held.mark, committed=committed_before(step))
        left = chaos.left()
        assert (left == 0) is committed_before(step)
        assert chaos.run_here().records == left


@pytest.mark.parametrize("number", range(len(STRIKES)), ids=STRIKES)
def test_postgres_struck_at_each_step_leaves_all_of_a_slice_or_nothing(trial, server: PostgresServer, seed: int, number: int):
    """Each slice has a separate transaction, which is stored as a whole or not at all."""
    strike = list(STRIKES.values())[number]
    strike_each(dealt(list(Step), number, len(STRIKES), seed), trial(2), server, strike)


@pytest.mark.thorough
@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("number", range(len(STAGED)), ids=STAGED)
def test_postgres_struck_at_each_step_leaves_all_of_a_staged_batch_or_nothing(trial, server: PostgresServer, seed: int, number: int):
    """All slices of a batch, whose rows a shuffle has mixed, share one transaction. If the server crashes, the staged rows are lost.
    `tests/integration/sink/test_staged.py` tries that, too, with less work."""
    chaos = trial(2, SHUFFLED)
    chaos.together = True
    chaos.run = lambda task: run_here(chaos.scenario, task=task)
    strike_each(dealt(list(Step), number, len(STAGED), seed), chaos, server, STRIKES[STAGED[number]])


@pytest.mark.parametrize("strike", STRIKES.values(), ids=STRIKES)
def test_commit_whose_answer_is_lost_is_stored_once(trial, server: PostgresServer, strike: Strike):
    """⑥ succeeded, but Postgres was struck before it answered. The row is read again, and nothing is loaded a second time."""
    chaos = trial(2)
    with chaos.held_here(Step.COMMIT) as held:
        with server.withholding_answers():
            pid = server.backend(COMMIT_SESSIONS)
            held.point.release()
            until(lambda: server.waits(pid, "SyncRep"), "the commit is on disk and its answer is withheld")
            chaos.check_stored(held.mark, committed=False)  # no other session sees it yet
            strike(server, pid)
            server.up()
        error = held.run.exception(180)
    # if the driver's session was lost too, the try fails once it has nothing left to do
    assert error is None if strike is PostgresServer.terminate else isinstance(error, DatabaseUnavailable)
    chaos.check_stored(held.mark, committed=True)
    assert chaos.run_here().records == 0
