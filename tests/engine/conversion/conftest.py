"""All tests of conversions: what is refused is refused with its reason and a way out."""

import pytest


@pytest.fixture(autouse=True)
def _refusals(refusals_are_whole: None) -> None:
    pass
