"""Weights that are drawn and not read, for a model of which only the shape matters."""

from dataclasses import dataclass

from minivllm_engine.model_config.config import ModelConfig


@dataclass(frozen=True, slots=True)
class RandomWeights:
    """Stands in a `PreparedModel` where a checkpoint's index would. `weights.fill_weights` draws them."""

    seed: int = 0

    def seems_tied(self, config: ModelConfig) -> bool:
        """Say whether the output head is the embedding: as the config says."""
        return config.tie_word_embeddings
