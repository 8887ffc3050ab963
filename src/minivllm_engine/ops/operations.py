"""What a model is computed with: one object for each kind of device, made once and held by the model.

The operations of a kind differ in speed and in the last bits of what they give, and not in what they mean.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from minivllm_engine.ops.attention.reference import KVShape
from minivllm_engine.ops.packed import Packing
from minivllm_engine.ops.products import Products, SeparateProducts
from minivllm_engine.ops.prompt_buffers import PromptBucket
from minivllm_engine.ops.sampling.race import RaceRows
from minivllm_engine.tensors.model_input import ModelInput

# q, k [num_tokens, H, K] and v [num_tokens, HV, V].
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass
class DeltaNetWeights:
    """What a Gated DeltaNet layer computes with between its projections. H key heads, HV value heads.

    Attributes:
        conv_weight: [W, conv_dim] of the convolution.
        A_log, dt_bias: [HV] fp32, of the decay.
        key_dim, value_dim: of all heads together.
    """

    conv_weight: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    num_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int

    def heads(self, convolved: torch.Tensor) -> Heads:
        """Cut [num_tokens, conv_dim] into q, k and v: views."""
        sizes = [self.key_dim, self.key_dim, self.value_dim]
        q, k, v = torch.split_with_sizes(convolved, sizes, dim=-1)
        rows = convolved.shape[0]
        return (
            q.view(rows, self.num_heads, -1),
            k.view(rows, self.num_heads, -1),
            v.view(rows, self.num_value_heads, -1),
        )

    @cached_property
    def fp32_conv_weight(self) -> tuple[torch.Tensor, ...]:
        return self.conv_weight.float().unbind(0)

    @cached_property
    def fp64_gate(self) -> tuple[torch.Tensor, torch.Tensor]:
        """-A and dt_bias."""
        return -self.A_log.double().exp(), self.dt_bias.double()


@dataclass(frozen=True, slots=True)
class Decodes:
    """Sequences of a step with one token each.

    Attributes:
        slots: [N] integers; negative ones are padding, where `starts` is None.
        positions: [N] integers, of the tokens. At 0 a sequence begins, and its state is zero.
        starts: the positions on the host; None where they are not known there.
    """

    slots: torch.Tensor
    positions: torch.Tensor
    starts: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Chunks:
    """Sequences of a step with any number of tokens, packed one after the other.

    Attributes:
        slots: [N] int64, no two alike.
        starts: tokens of each that came before; at 0 its state is zero.
        lengths: tokens of each.
    """

    slots: torch.Tensor
    starts: tuple[int, ...]
    lengths: tuple[int, ...]


class DeltaInputs(NamedTuple):
    """What the gated delta rule takes of N tokens.

    Attributes:
        q, k: [N, H, K], raw or as the convolution gives them.
        v: [N, HV, V].
        a, b: [N, HV], raw gates.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor


# Advances the states [num_slots, HV, V, K] of the plan's sequences, and reads them: [N, HV, V] in v's dtype.
DeltaRule = Callable[[DeltaInputs, DeltaNetWeights, torch.Tensor, Any], torch.Tensor]


@dataclass(frozen=True, slots=True)
class DeltaNetOperations:
    """The convolution and the delta rule of decodes and of chunks, with what makes their plans.

    A plan is the same for all layers of a step. The convolutions take (x, pool, weights, plan); that of
    chunks gives queries, keys and values as `chunks` wants them: normed already, or raw. The rules take
    (inputs, weights, pool, plan).

    Attributes:
        conv_step_plan, step_plan: make plans of Decodes.
        conv_chunk_plan, chunk_plan: make plans of Chunks; the first also takes the number of conv_weight.
    """

    conv_step: Callable[[torch.Tensor, torch.Tensor, DeltaNetWeights, Any], torch.Tensor]
    conv_chunks: Callable[[torch.Tensor, torch.Tensor, DeltaNetWeights, Any], Heads]
    conv_step_plan: Callable[[Decodes], Any]
    conv_chunk_plan: Callable[[Chunks, int], Any]
    step: DeltaRule
    step_plan: Callable[[Decodes], Any]
    chunks: DeltaRule
    chunk_plan: Callable[[Chunks], Any]


@dataclass(frozen=True, slots=True)
class AttentionOperations:
    """Attention over the paged cache: `attend` takes (q, keys, values, plan)."""

    plan: Callable[[ModelInput, KVShape, torch.dtype], Any]
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Any], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Operations:
    """All operations of a model; see ops/*/reference.py for what each of them takes and gives.

    Attributes:
        graph_decode: decodes are planned from tensors alone and may be padded, so that a step of them
            can be captured as a CUDA graph and replayed with other numbers. Then `greedy` can write to
            given tensors: `out`.
        inputs_adjacent: of a weight [in, out] the inputs of one output lie side by side in memory, as in
            checkpoints; else the outputs of one input do.
        graph_chunks: plans of attention, convolution and delta rule for chunks of prompts that are read from
            buffers, so that they too can be captured; None where there is no such thing.
        packing: lays out weights for the products, once they are filled; None: they stay as they are.
        few_rows: products for steps of at most `max_few_rows` tokens; they need `inputs_adjacent`.
    """

    graph_decode: bool
    products: SeparateProducts
    embed: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    rotary_cos_sin: Callable[
        [torch.Tensor, torch.Tensor, float, torch.dtype], tuple[torch.Tensor, torch.Tensor]
    ]
    norm_rotate_write: Callable[..., torch.Tensor]
    greedy: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    race: Callable[[torch.Tensor, torch.Tensor, RaceRows], torch.Tensor]
    likelihoods: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]
    delta_net: DeltaNetOperations
    attention: AttentionOperations
    inputs_adjacent: bool = False
    packing: Packing | None = None
    few_rows: Products | None = None
    max_few_rows: int = 0
    graph_chunks: Callable[[PromptBucket, KVShape, torch.dtype], tuple[Any, Any, Any]] | None = None

    def are_inputs_adjacent(self, num_in: int, num_out: int, dtype: torch.dtype) -> bool:
        """Say how a weight of this size is to lie in memory while it is filled."""
        packing = self.packing
        return self.inputs_adjacent or (
            packing is not None and packing.suits(num_in, num_out, dtype)
        )

    def products_for(self, num_rows: int) -> Products:
        """Choose those for steps of few tokens, or for more."""
        few = self.few_rows
        return few if few is not None and num_rows <= self.max_few_rows else self.products
