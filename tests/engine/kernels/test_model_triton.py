"""The kernels put together to the whole model: logits and caches as those of the reference operations."""

import torch

from support.kernel_checks import needs_interpreter
from support.kernel_checks.model import check_mixed_steps

pytestmark = needs_interpreter


def test_mixed_steps_give_the_logits_and_caches_of_the_reference(tiny_model) -> None:
    check_mixed_steps(tiny_model, torch.device("cpu"), length=6)
