import os
from pathlib import Path

import pytest
import torch

from support.byte_tokenizer import write_byte_tokenizer
from support.tiny_checkpoint import write_tiny_checkpoint

if not torch.cuda.is_available():
    # Triton reads this when it is first imported: kernels are interpreted then, and need no card.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def _repeatable() -> None:
    torch.manual_seed(0)
    # At these sizes threads cost more than they give, and on a busy machine far more.
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random 4-layer model in fp32 with a tokenizer of one token a byte, and no end id of its own."""
    path = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    write_byte_tokenizer(path)
    return path
