"""Projections with what lies around them: the norm before, the activation between, the residual after.

A layer says what is to be computed; how much of it is one kernel is decided here.

Libraries compute products of few rows with other code, and other roundings, than those of many, so that a
sequence would get other logits in a batch than alone. Measured with MKL: a row's bits stay the same from 2
rows on for a weight stored as [in, out] (with up to 448 inputs; with thousands, from 2 to 128 rows), from 16
rows on for one stored as [out, in].
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from minivllm_engine.ops.packed import PackedWeight


def linear(
    x: torch.Tensor, weight: torch.Tensor | PackedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x @ weight + bias.

    Args:
        x: [num_rows, in].
        weight: [in, out]: for few rows up to a third faster than the [out, in] of checkpoints.
        bias: [out].
    """
    if isinstance(weight, PackedWeight):
        return weight.multiply(x, bias)
    if x.shape[0] == 1:
        return linear(x.expand(2, -1), weight, bias)[:1]
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def output_head(x: torch.Tensor, embedding: torch.Tensor | PackedWeight) -> torch.Tensor:
    """Return logits: x [num_rows, hidden] times an embedding [vocab, hidden], whose lookup wants it so."""
    if isinstance(embedding, PackedWeight):
        return embedding.multiply(x)
    num_rows = x.shape[0]
    if num_rows < 16:
        x = F.pad(x, (0, 0, 0, 16 - num_rows))
    return F.linear(x, embedding)[:num_rows]


def plain_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply as `linear` does, for a device whose library is to choose by the number of rows."""
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def plain_output_head(
    x: torch.Tensor, embedding: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply as `output_head` does, likewise; into `out` [num_rows, vocab], if it is given."""
    return torch.mm(x, embedding.t(), out=out)


class Norm(Protocol):
    """scale [size] fp32 and eps [1] fp32 of a root-mean-square norm."""

    @property
    def scale(self) -> torch.Tensor: ...

    @property
    def eps(self) -> torch.Tensor: ...


@dataclass(slots=True)
class Residual:
    """The residual stream of a step, [num_tokens, hidden_size]; `pending` is still to be added to it."""

    stream: torch.Tensor
    pending: torch.Tensor | None = None


class Products(Protocol):
    """Everything that is multiplied with the weights of a model. Weights are [in, out]."""

    def norm_linear(
        self,
        residual: Residual,
        norm: Norm,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute norm(residual) @ weight + bias: [num_tokens, out]."""

    def norm_swiglu(self, residual: Residual, norm: Norm, gate_up: torch.Tensor) -> torch.Tensor:
        """Compute silu(gate) * up of norm(residual) @ gate_up, which holds both: [num_tokens, wide]."""

    def linear_add(self, residual: Residual, x: torch.Tensor, weight: torch.Tensor) -> None:
        """Add x @ weight to the residual stream."""

    def gated_norm_linear_add(
        self,
        residual: Residual,
        x: torch.Tensor,
        gate: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: torch.Tensor,
        weight: torch.Tensor,
    ) -> None:
        """Add gated_rms_norm(x, gate) @ weight to the stream, for x and gate [num_tokens, HV, V]."""

    def sigmoid_gate_linear_add(
        self,
        residual: Residual,
        x: torch.Tensor,
        gate: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> None:
        """Add (x * sigmoid(gate)) @ weight + bias to the stream, for x and gate [num_tokens, H, d]."""

    def final_norm(self, residual: Residual, norm: Norm) -> torch.Tensor:
        """Compute norm(residual): [num_tokens, hidden_size]."""

    def logits(
        self,
        residual: Residual,
        norm: Norm,
        embedding: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply norm(residual) with an embedding [vocab_size, hidden_size], into `out` if it is given."""


@dataclass(frozen=True, slots=True)
class SeparateProducts:
    """A library's matrix products, and an operation for each thing around them."""

    linear: Callable[..., torch.Tensor]
    output_head: Callable[..., torch.Tensor]
    rms_norm: Callable[..., torch.Tensor]
    add_rms_norm: Callable[..., torch.Tensor]
    gated_rms_norm: Callable[..., torch.Tensor]
    silu_mul: Callable[[torch.Tensor], torch.Tensor]
    sigmoid_mul: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def norm_linear(
        self,
        residual: Residual,
        norm: Norm,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.linear(self.final_norm(residual, norm), weight, bias)

    def norm_swiglu(self, residual: Residual, norm: Norm, gate_up: torch.Tensor) -> torch.Tensor:
        return self.silu_mul(self.linear(self.final_norm(residual, norm), gate_up))

    def linear_add(self, residual: Residual, x: torch.Tensor, weight: torch.Tensor) -> None:
        residual.pending = self.linear(x, weight)

    def gated_norm_linear_add(
        self,
        residual: Residual,
        x: torch.Tensor,
        gate: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: torch.Tensor,
        weight: torch.Tensor,
    ) -> None:
        normed = self.gated_rms_norm(x, gate, norm_weight, eps).flatten(1)
        residual.pending = self.linear(normed, weight)

    def sigmoid_gate_linear_add(
        self,
        residual: Residual,
        x: torch.Tensor,
        gate: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> None:
        residual.pending = self.linear(self.sigmoid_mul(x, gate).flatten(1), weight, bias)

    def final_norm(self, residual: Residual, norm: Norm) -> torch.Tensor:
        pending, residual.pending = residual.pending, None
        if pending is None:
            return self.rms_norm(residual.stream, norm.scale, norm.eps)
        return self.add_rms_norm(pending, residual.stream, norm.scale, norm.eps)

    def logits(
        self,
        residual: Residual,
        norm: Norm,
        embedding: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        normed = self.final_norm(residual, norm)
        return (
            self.output_head(normed, embedding)
            if out is None
            else self.output_head(normed, embedding, out=out)
        )
