"""The products of a step of a few rows, each one kernel. Weights are those of other steps, seen turned."""

import torch

from minivllm_engine.ops.fused.triton import rms_norm
from minivllm_engine.ops.products import Norm, Residual
from minivllm_engine.ops.small_batch import triton as fused


class SmallBatchProducts:
    """See ops/products.py. Of weights [in, out] the inputs of one output lie side by side."""

    def norm_linear(
        self,
        residual: Residual,
        norm: Norm,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return fused.norm_linear(residual.stream, norm.scale, norm.eps, weight.t(), bias)

    def norm_swiglu(self, residual: Residual, norm: Norm, gate_up: torch.Tensor) -> torch.Tensor:
        return fused.norm_linear_swiglu(residual.stream, norm.scale, norm.eps, gate_up.t())

    def linear_add(self, residual: Residual, x: torch.Tensor, weight: torch.Tensor) -> None:
        fused.linear_add_(x, weight.t(), residual.stream)

    def gated_norm_linear_add(
        self,
        residual: Residual,
        x: torch.Tensor,
        gate: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: torch.Tensor,
        weight: torch.Tensor,
    ) -> None:
        fused.gated_norm_linear_add_(x, gate, norm_weight, eps, weight.t(), residual.stream)

    def sigmoid_gate_linear_add(
        self,
        residual: Residual,
        x: torch.Tensor,
        gate: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> None:
        fused.sigmoid_gate_linear_add_(x, gate, weight.t(), residual.stream, bias)

    def final_norm(self, residual: Residual, norm: Norm) -> torch.Tensor:
        return rms_norm(residual.stream, norm.scale, norm.eps)

    def logits(
        self,
        residual: Residual,
        norm: Norm,
        embedding: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return fused.norm_linear(residual.stream, norm.scale, norm.eps, embedding, out=out)
