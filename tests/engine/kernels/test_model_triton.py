"""The kernels put together to the whole model: logits and caches as those of the reference operations."""

import pytest
import torch

from support.kernel_checks import needs_interpreter
from support.kernel_checks.model import check_mixed_steps, check_static_steps

pytestmark = needs_interpreter


def test_mixed_steps_give_the_logits_and_caches_of_the_reference(tiny_model) -> None:
    check_mixed_steps(tiny_model, torch.device("cpu"), length=6)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NaN that padding lanes see
def test_static_decode_steps_give_the_logits_of_the_reference(tiny_model) -> None:
    check_static_steps(tiny_model, torch.device("cpu"))
