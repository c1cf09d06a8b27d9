"""Shared fixtures: pools of ranks, one per world size, for the whole run."""

from collections.abc import Iterator

import pytest
from multiproc.pool import RankPool


class Pools:
    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def __getitem__(self, size: int) -> RankPool:
        if size not in self._pools:
            self._pools[size] = RankPool(size)
        return self._pools[size]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    found = Pools()
    yield found
    found.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden plans anew")
