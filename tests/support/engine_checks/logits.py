"""Logits of whole models against transformers."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from minivllm_engine.ops.operations import Operations
from support.packed_runner import PackedRunner, load_model
from support.tiny_checkpoint import official_dtypes, random_tensors, write_checkpoint
from support.transformers_logits import kept_positions, transformers_logits

NUM_DECODES = 8


@dataclass(frozen=True)
class Case:
    """A checkpoint whose weights are bf16 numbers, sequences, and what transformers says to them."""

    path: Path
    sequences: list[list[int]]
    expected: dict[str, torch.Tensor]
    device: str

    @classmethod
    def make(
        cls, path: Path, config: dict, prompt_lengths: Sequence[int], *, device: str
    ) -> "Case":
        """config: flat. Each prompt is followed by NUM_DECODES more tokens."""
        tensors = official_dtypes(random_tensors(config, seed=5, device=device))
        write_checkpoint(path, config, {name: t.cpu() for name, t in tensors.items()})
        generator = torch.Generator().manual_seed(0)
        sequences = [
            torch.randint(0, config["vocab_size"], (n + NUM_DECODES,), generator=generator).tolist()
            for n in prompt_lengths
        ]
        return cls(path, sequences, transformers_logits(path, sequences, device), device)

    def compute(self, dtype: torch.dtype, operations: Operations) -> list[list[torch.Tensor]]:
        """Logits of all sequences side by side, and of each alone: prompts at once, then token by token."""
        model = load_model(self.path, dtype, torch.device(self.device), operations)
        found = []
        for chosen in ([*range(len(self.sequences))], *([i] for i in range(len(self.sequences)))):
            runner = PackedRunner(model)
            rows = [runner.add(self.sequences[i]) for i in chosen]
            runner.step(*((row, len(row.token_ids) - NUM_DECODES) for row in rows))
            for _ in range(NUM_DECODES):
                runner.step(*((row, 1) for row in rows))
            found.append(
                [row.all_logits[kept_positions(len(row.token_ids))].float().cpu() for row in rows]
            )
        together, *alone = found
        return [together, [one for (one,) in alone]]

    def check_fp32(self, operations: Operations, *, tolerance: float) -> None:
        """tolerance: of the largest difference, in units of the logits' standard deviation."""
        for logits in self.compute(torch.float32, operations):
            for number, own in enumerate(logits):
                expected = self.expected[f"fp32.{number}"]
                worst = float((own - expected).abs().max() / expected.std())
                print(f"sequence {number}: largest difference {worst:.2e} of a standard deviation")
                assert worst < tolerance, f"sequence {number}: {worst:.2e}"

    def check_tf32(self, operations: Operations) -> None:
        """fp32 with products in TF32, whose rounding is an eighth of bf16's: nearer by a factor of 4."""
        self._compare_with_bf16(torch.float32, operations, part=1 / 4)

    def check_bf16(self, operations: Operations) -> None:
        """Not farther from transformers in fp32 than transformers in bf16 is."""
        self._compare_with_bf16(torch.bfloat16, operations, part=1.25)

    def _compare_with_bf16(self, dtype: torch.dtype, operations: Operations, part: float) -> None:
        for logits in self.compute(dtype, operations):
            own = torch.cat(logits)
            exact, rounded = (
                torch.cat([self.expected[f"{name}.{i}"] for i in range(len(logits))])
                for name in ("fp32", "bf16")
            )
            error, allowed = ((x - exact).norm() / exact.norm() for x in (own, rounded))
            print(f"error in {dtype} {error:.2e}, of transformers in bf16 {allowed:.2e}")
            assert error <= part * allowed, f"{error:.2e}, transformers in bf16 {allowed:.2e}"


def flat_config(nested: dict) -> dict:
    """The text part of a config.json, as a config.json of its own."""
    text = json.loads(json.dumps(nested["text_config"]))
    layers, every = text["num_hidden_layers"], text["full_attention_interval"]
    text["layer_types"] = [
        "linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)
    ]
    return text | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "tie_word_embeddings": nested["tie_word_embeddings"],
    }
