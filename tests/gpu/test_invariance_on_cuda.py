"""The invariance matrix on the card: tiny model in fp32, poisoned pools, graph and eager, steps ahead."""

import pytest

from support.device_engine import Rig
from support.engine_checks.invariance import check_invariance
from support.on_card import needs_card
from support.oracle import Oracle

pytestmark = needs_card


@pytest.mark.parametrize("block_size", [16, 64])
def test_every_way_gives_the_answer_of_the_cpu(
    tiny_model, rig: Rig, oracle: Oracle, block_size: int
) -> None:
    with rig.engine(tiny_model, block_size=block_size, num_blocks=200) as llm:
        check_invariance(llm, oracle, [1, 63, 64, 65, 130])
