"""All tests of conversions: what is refused is refused with its reason and a way out."""

from collections.abc import Iterator

import pytest

from support.refusals import whole_refusals


@pytest.fixture(autouse=True)
def refusals_are_whole(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with whole_refusals(monkeypatch):
        yield
