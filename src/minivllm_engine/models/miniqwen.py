"""The hybrid decoder of the Qwen3.5 family: layers of Gated DeltaNet and of gated attention."""

import torch
import torch.nn.functional as F
from torch import nn

from minivllm_engine.model_config.config import ModelConfig
from minivllm_engine.models.layers.attention import GatedAttention
from minivllm_engine.models.layers.gated_deltanet import GatedDeltaNet
from minivllm_engine.models.layers.mlp import MLP
from minivllm_engine.models.layers.step_plan import StepPlan, inverse_frequencies
from minivllm_engine.models.layers.weight import RMSNorm, pack_weights
from minivllm_engine.ops.operations import Operations
from minivllm_engine.ops.products import Residual
from minivllm_engine.ops.reference_backend import REFERENCE
from minivllm_engine.tensors.cache_pool import CachePool
from minivllm_engine.tensors.model_input import ModelInput


class DecoderLayer(nn.Module):
    """A mixer and an MLP, each behind a norm and added to the residual stream.

    `rank` counts the layers of its kind before it.
    """

    def __init__(
        self,
        config: ModelConfig,
        operations: Operations,
        index: int,
        rank: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        mixer = GatedAttention if config.is_attention(index) else GatedDeltaNet
        self.rank = rank
        self.mixer: GatedAttention | GatedDeltaNet = mixer(
            config, operations, dtype=dtype, device=device
        )
        self.mlp = MLP(config, operations, dtype=dtype, device=device)
        self.input_norm = RMSNorm(
            config.hidden_size, eps=config.rms_norm_eps, dtype=dtype, device=device
        )
        self.mlp_norm = RMSNorm(
            config.hidden_size, eps=config.rms_norm_eps, dtype=dtype, device=device
        )

    def checkpoint_views(self) -> dict[str, torch.Tensor]:
        part = "self_attn" if isinstance(self.mixer, GatedAttention) else "linear_attn"
        return {
            **{f"{part}.{name}": view for name, view in self.mixer.checkpoint_views().items()},
            **{f"mlp.{name}": view for name, view in self.mlp.checkpoint_views().items()},
            "input_layernorm.weight": self.input_norm.weight,
            "post_attention_layernorm.weight": self.mlp_norm.weight,
        }

    def forward(self, residual: Residual, pool: CachePool, plan: StepPlan) -> None:
        """Add the outputs of both to the residual stream."""
        if isinstance(self.mixer, GatedAttention):
            cache = pool.keys[self.rank], pool.values[self.rank]
        else:
            cache = pool.conv[self.rank], pool.recurrent[self.rank]
        self.mixer(residual, self.input_norm, *cache, plan)
        self.mlp(residual, self.mlp_norm, plan.products)


class MiniQwenForCausalLM(nn.Module):
    """The whole model; weights are not initialised, `load_weights` fills them.

    Args:
        config: its shape. `tie_word_embeddings` says that there is no head of its own.
        operations: what it computes with.
        dtype: of weights and activations; A_log, dt_bias and the DeltaNet norms are fp32.
    """

    def __init__(
        self,
        config: ModelConfig,
        operations: Operations = REFERENCE,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.config, self.operations = config, operations
        self.dtype, self.device = dtype, device
        self.embedding = self._vocabulary_matrix()
        self.head = self.embedding if config.tie_word_embeddings else self._vocabulary_matrix()
        ranks = {"linear_attention": 0, "full_attention": 0}
        layers = []
        for i, kind in enumerate(config.layer_types):
            layer = DecoderLayer(config, operations, i, ranks[kind], dtype=dtype, device=device)
            layers.append(layer)
            ranks[kind] += 1
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype, device=device)
        self.frequencies = inverse_frequencies(config.rope, config.rotary_dim).to(device)

    def _vocabulary_matrix(self) -> nn.Parameter:
        shape = (self.config.vocab_size, self.config.hidden_size)
        return nn.Parameter(
            torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False
        )

    def set_tied(self, tied: bool) -> None:
        """Let the head be the embedding, or a matrix of its own, which is still to be filled."""
        self.head = self.embedding if tied else self._vocabulary_matrix()

    def checkpoint_views(self) -> dict[str, torch.Tensor]:
        """Map canonical tensor names to where their values go; views have as many elements as the tensor."""
        views: dict[str, torch.Tensor] = {
            "model.embed_tokens.weight": self.embedding,
            "model.norm.weight": self.norm.weight,
        }
        if self.head is not self.embedding:
            views["lm_head.weight"] = self.head
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            views |= {
                f"model.layers.{i}.{name}": view for name, view in layer.checkpoint_views().items()
            }
        return views

    def pack(self, *, tied_head: bool) -> None:
        """Let the operations lay out the weights, which are filled; then `checkpoint_views` is no more.

        Args:
            tied_head: lay out a head that is the embedding too, which stays beside it for lookups.
        """
        operations = self.operations
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            for part in (layer.mixer, layer.mlp):
                pack_weights(part, part.MATRICES, operations)
        packing, (num_out, num_in) = operations.packing, self.head.shape
        if self.head is self.embedding and not tied_head:
            return
        if packing is not None and packing.suits(num_in, num_out, self.dtype):
            packed = packing.pack(self.head.t())
            if packed is not None:
                delattr(self, "head")
                setattr(self, "head", packed)  # noqa: B010 (not the type that it had)

    def forward(self, batch: ModelInput, pool: CachePool) -> torch.Tensor:
        """Run one step: advance the caches of its sequences in `pool`, and return logits.

        Args:
            batch: at least one token.
            pool: entries of the batch's slots and blocks are read (where a sequence has a past) and
                written; no other entry is touched.

        Returns:
            [num_logits, vocab_size] in the model's dtype, one row for each of `batch.logits_rows`.
        """
        return self.logits(self.hidden_states(batch, pool).index_select(0, batch.logits_rows))

    def hidden_states(self, batch: ModelInput, pool: CachePool) -> torch.Tensor:
        """Do what `forward` does without the head: [num_tokens, hidden_size], after the last norm."""
        plan = self._plan(batch, pool)
        residual = self._run_layers(self._embed(batch), plan, pool)
        return plan.products.final_norm(residual, self.norm)

    def all_logits(
        self, batch: ModelInput, pool: CachePool, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Do what `forward` does, for all tokens: [num_tokens, vocab_size], into `out` if it is given."""
        plan = self._plan(batch, pool)
        residual = self._run_layers(self._embed(batch), plan, pool)
        return plan.products.logits(residual, self.norm, self.head, out)

    def planned_states(
        self, token_ids: torch.Tensor, plan: StepPlan, pool: CachePool
    ) -> torch.Tensor:
        """Do what `hidden_states` does, of a step whose plan was made by others."""
        stream = F.embedding(token_ids, self.embedding)
        return plan.products.final_norm(self._run_layers(stream, plan, pool), self.norm)

    def _plan(self, batch: ModelInput, pool: CachePool) -> StepPlan:
        return StepPlan.build(
            batch,
            self.config,
            self.operations,
            self.frequencies,
            block_size=pool.block_size,
            dtype=self.dtype,
        )

    def _run_layers(self, stream: torch.Tensor, plan: StepPlan, pool: CachePool) -> Residual:
        residual = Residual(stream)
        for layer in self.layers:
            layer(residual, pool, plan)
        return residual

    def _embed(self, batch: ModelInput) -> torch.Tensor:
        """[num_tokens, hidden_size]."""
        known = batch.sampled
        if known is None:
            return F.embedding(batch.token_ids, self.embedding)
        ids, sources = batch.token_ids, known.sources
        return self.operations.embed(ids, sources, known.token_ids, self.embedding)

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Apply the head: [num_rows, hidden_size] to [num_rows, vocab_size]."""
        return self.operations.products.output_head(normed, self.head)
