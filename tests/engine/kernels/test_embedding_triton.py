"""The embedding of tokens that lie in two places, in Triton's interpreter."""

import pytest
import torch

from support.kernel_checks import embedding, needs_interpreter

pytestmark = needs_interpreter

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("num_rows", "hidden"), [(1, 64), (7, 1100)])
def test_tokens_of_a_step_and_tokens_sampled_before(
    num_rows: int, hidden: int, dtype: torch.dtype
) -> None:
    embedding.check_embed(CPU, dtype, num_rows, hidden)
