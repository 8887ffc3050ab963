"""Projections with what lies around them: the norm before, the activation between, the residual after.

A layer says what is to be computed; how much of it is one kernel is decided here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


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
        """norm(residual) @ weight + bias: [num_tokens, out]."""

    def norm_swiglu(self, residual: Residual, norm: Norm, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of norm(residual) @ gate_up, which holds both side by side: [num_tokens, wide]."""

    def linear_add(self, residual: Residual, x: torch.Tensor, weight: torch.Tensor) -> None:
        """residual += x @ weight."""

    def gated_norm_linear_add(
        self,
        residual: Residual,
        x: torch.Tensor,
        gate: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: torch.Tensor,
        weight: torch.Tensor,
    ) -> None:
        """residual += gated_rms_norm(x, gate) @ weight, for x and gate [num_tokens, HV, V]."""

    def sigmoid_gate_linear_add(
        self,
        residual: Residual,
        x: torch.Tensor,
        gate: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> None:
        """residual += (x * sigmoid(gate)) @ weight + bias, for x and gate [num_tokens, H, d]."""

    def final_norm(self, residual: Residual, norm: Norm) -> torch.Tensor:
        """norm(residual): [num_tokens, hidden_size]."""

    def logits(
        self,
        residual: Residual,
        norm: Norm,
        embedding: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """norm(residual) times an embedding [vocab_size, hidden_size], into `out` if it is given."""


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
