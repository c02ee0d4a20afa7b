"""Postgres, struck at each step in turn: one of its sessions ended, one of its processes killed, the whole server stopped at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
from tests.chaos.feed import SPARK_TRANSFORM
from tests.chaos.postgres_server import COMMIT_SESSIONS, DRIVER_SESSIONS, PostgresServer
from tests.chaos.trial import Trial, committed_before
from tests.points import until
from tests.sampling import dealt
from tests.spark_here import run_here, spark_session

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
    """The run's, which deals the steps to the strikes."""
    return int(pytestconfig.getoption("randomly_seed", 0))


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A session for the module, in this process."""
    with spark_session(tmp_path_factory.mktemp("transforms")):
        yield


def strike_each(steps: Sequence[Step], chaos: Trial, server: PostgresServer, strike: Strike) -> None:
    """The run fails as unavailable; its next try loads the rest, or finds that there is nothing left to load."""
    for step in steps:
        with chaos.held_here(step) as held:
            # before ⑦ the commit's own session is closed already, and there is only the driver's
            strike(server, server.backend(DRIVER_SESSIONS if step is Step.RECEIPT else COMMIT_SESSIONS))
            held.point.release()
            server.up()
            assert isinstance(held.run.exception(60), Unavailable), step
        chaos.check_stored(held.mark, committed=committed_before(step))
        left = chaos.left()
        assert (left == 0) is committed_before(step)
        assert chaos.run_here().records == left


@pytest.mark.parametrize("number", range(len(STRIKES)), ids=STRIKES)
def test_postgres_struck_at_each_step_leaves_all_of_a_slice_or_nothing(trial, server: PostgresServer, seed: int, number: int):
    """Each slice has a transaction of its own, which is there or not."""
    strike = list(STRIKES.values())[number]
    strike_each(dealt(list(Step), number, len(STRIKES), seed), trial(2), server, strike)


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("number", range(len(STAGED)), ids=STAGED)
def test_postgres_struck_at_each_step_leaves_all_of_a_staged_batch_or_nothing(trial, server: PostgresServer, seed: int, number: int):
    """All slices of a batch, whose rows a shuffle has mixed, have one transaction. What was staged is gone with a server that crashed."""
    chaos = trial(2, SHUFFLED)
    chaos.together = True
    chaos.run = lambda task: run_here(chaos.scenario, task=task)
    strike_each(dealt(list(Step), number, len(STAGED), seed), chaos, server, STRIKES[STAGED[number]])


@pytest.mark.parametrize("strike", STRIKES.values(), ids=STRIKES)
def test_commit_whose_answer_is_lost_is_stored_once(trial, server: PostgresServer, strike: Strike):
    """⑥ was done, and Postgres was struck before it said so: the row is read, and nothing is loaded a second time."""
    chaos = trial(2)
    with chaos.held_here(Step.COMMIT) as held:
        with server.withholding_answers():
            pid = server.backend(COMMIT_SESSIONS)
            held.point.release()
            until(lambda: server.waits(pid, "SyncRep"), "the commit is on disk and its answer is withheld")
            chaos.check_stored(held.mark, committed=False)  # nobody else sees it yet
            strike(server, pid)
            server.up()
        error = held.run.exception(60)
    # where the driver's own session was lost too, the try fails when it has nothing left to do
    assert error is None if strike is PostgresServer.terminate else isinstance(error, DatabaseUnavailable)
    chaos.check_stored(held.mark, committed=True)
    assert chaos.run_here().records == 0
