"""transformers as the oracle: one sequence a call, plain PyTorch, no padding ever."""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

# Wherever fla can be imported, transformers calls it, for tensors on a CPU too.
assert not any(name == "fla" or name.startswith("fla.") for name in sys.modules)
sys.modules["fla"] = None  # type: ignore[assignment]

from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    DynamicCache,
    Qwen3_5Config,
    Qwen3_5TextConfig,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import (  # noqa: E402
    Qwen3_5TextRotaryEmbedding,
)

__all__ = [
    "Qwen3_5Config",
    "Qwen3_5TextConfig",
    "Qwen3_5TextRotaryEmbedding",
    "TransformersOracle",
]


class TransformersOracle:
    """A checkpoint run by transformers."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32) -> None:
        model, report = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, output_loading_info=True
        )
        assert not report["missing_keys"], "a missing head would be random"
        self.model = model.eval()

    @torch.inference_mode()
    def logits(
        self, token_ids: Sequence[int], attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[num_tokens, vocab_size] of one sequence from its start. Needs no cache.

        Raises:
            ValueError: the mask hides something. Padding runs into convolution and state on one side
                and is only neutral on the other, so here it is refused on both.
        """
        if attention_mask is not None and not attention_mask.bool().all():
            raise ValueError("the oracle takes no padding: one sequence a call, no mask with zeros")
        ids = torch.tensor([list(token_ids)], device=self.model.device)
        return self.model(ids, attention_mask=attention_mask, use_cache=False).logits[0]

    @torch.inference_mode()
    def run(self, token_ids: Sequence[int]) -> tuple[torch.Tensor, DynamicCache]:
        """Logits as from `logits`, and the cache afterwards."""
        cache = DynamicCache(config=self.model.config)
        ids = torch.tensor([list(token_ids)])
        return self.model(ids, cache=cache, use_cache=True).logits[0], cache
