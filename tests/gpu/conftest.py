"""What the tests of the engine on the card share."""

import pytest

from support.device_engine import Rig
from support.oracle import Oracle


@pytest.fixture(scope="session")
def rig() -> Rig:
    return Rig("cuda")


@pytest.fixture(scope="session")
def oracle(tiny_model) -> Oracle:
    """The tiny model on the CPU, in fp32, one token a step."""
    return Oracle(tiny_model, 12, device="cpu")
