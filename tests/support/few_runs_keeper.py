"""A keeper whose applications serve two runs, ``python -m tests.support.few_runs_keeper SOCKET``."""

from tidemark.spark import keeper

if __name__ == "__main__":
    keeper.RUNS_PER_APPLICATION = 2
    keeper.main()
