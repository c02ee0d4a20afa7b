"""A keeper whose applications serve two runs, for `tests.integration.test_shared_spark`: ``python -m tests.few_runs_keeper SOCKET``."""

from tidemark.spark import keeper

if __name__ == "__main__":
    keeper.RUNS_PER_APPLICATION = 2
    keeper.main()
