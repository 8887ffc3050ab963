"""The hybrid decoder, for training only: packed conversations, no cache.

Parameter names are those of a Qwen3.5 checkpoint below "model.language_model.". Several
conversations share a row; `docs` numbers them, and nothing flows from one to another.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Zero-centred: multiplies by 1 + weight."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


class GatedRMSNorm(nn.Module):
    """Multiplies by the plain weight, then by silu(gate)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        x = x.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight
        return x * F.silu(gate.float())


def causal_conv(x: Tensor, weight: Tensor, docs: Tensor) -> Tensor:
    """Depthwise convolution over time that does not look into another conversation."""
    conv_weight = weight.shape[-1]  # x: [B, T, C], weight: [C, conv_weight]
    out = x * weight[:, -1]
    for back in range(1, conv_weight):
        same = F.pad(docs[:, back:] == docs[:, :-back], (back, 0))
        shifted = F.pad(x[:, :-back], (0, 0, back, 0))
        out = out + torch.where(same.unsqueeze(-1), shifted, 0.0) * weight[:, -1 - back]
    return F.silu(out)


def l2_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def chunked_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, docs: Tensor, chunk: int
) -> Tensor:
    """Gated delta rule over whole rows, state zero at the start of every conversation.

    q, k: [B, T, Hk, K]; v: [B, T, Hv, V]; g, beta: [B, T, Hv]; docs: [B, T]; T a multiple of
    chunk. Value head j reads key head j // (Hv // Hk). All fp32.
    """
    batch, length, key_heads, key_dim = k.shape
    value_heads, value_dim = v.shape[-2:]
    group, chunks = value_heads // key_heads, length // chunk

    def split(x: Tensor) -> Tensor:  # [B, T, H, D] -> [B, H, N, C, D]
        return x.view(batch, chunks, chunk, x.shape[2], -1).permute(0, 3, 1, 2, 4)

    q, k, v = split(q) * key_dim**-0.5, split(k), split(v)
    g, beta = split(g).squeeze(-1).cumsum(-1), split(beta)
    docs = docs.view(batch, 1, chunks, chunk)
    last = docs[..., -1:]
    before = F.pad(last[:, :, :-1], (0, 0, 1, 0), value=-1)
    continues = (docs == before).unsqueeze(-1)  # reads the state of the chunk before
    remains = (docs == last).unsqueeze(-1)  # belongs to the conversation that goes on
    visible = (docs.unsqueeze(-1) == docs.unsqueeze(-2)) & torch.ones(
        chunk, chunk, dtype=torch.bool, device=q.device
    ).tril()

    def per_value_head(x: Tensor) -> Tensor:
        return x.repeat_interleave(group, dim=1)

    decay = (g.unsqueeze(-1) - g.unsqueeze(-2)).masked_fill(~visible, float("-inf")).exp()
    system = per_value_head(k @ k.transpose(-1, -2)) * decay * beta
    scores = per_value_head(q @ k.transpose(-1, -2)) * decay
    k, q = per_value_head(k), per_value_head(q)
    growth = torch.where(continues, g.unsqueeze(-1).exp(), 0.0)
    right = torch.cat((v * beta, k * beta * growth), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    new, read = solved.split((value_dim, key_dim), -1)

    q = q * growth
    k = torch.where(remains, k * (g[..., -1:] - g).exp().unsqueeze(-1), 0.0).transpose(-1, -2)
    keep = growth[..., -1:, :]
    outputs = [scores[:, :, 0] @ new[:, :, 0]]
    state = k[:, :, 0] @ new[:, :, 0]
    for n in range(1, chunks):
        value = new[:, :, n] - read[:, :, n] @ state
        outputs.append(q[:, :, n] @ state + scores[:, :, n] @ value)
        state = state * keep[:, :, n] + k[:, :, n] @ value
    return torch.stack(outputs, 2).permute(0, 2, 3, 1, 4).reshape(batch, length, value_heads, -1)


class DeltaNet(nn.Module):
    def __init__(self, c: dict[str, Any], chunk: int) -> None:
        super().__init__()
        self.key_heads, self.value_heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
        self.key_dim = self.key_heads * c["linear_key_head_dim"]
        self.value_dim = self.value_heads * c["linear_value_head_dim"]
        hidden, channels = c["hidden_size"], 2 * self.key_dim + self.value_dim
        self.chunk = chunk
        self.in_proj_qkv = nn.Linear(hidden, channels, bias=False)
        self.in_proj_z = nn.Linear(hidden, self.value_dim, bias=False)
        self.in_proj_b = nn.Linear(hidden, self.value_heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, self.value_heads, bias=False)
        conv_weight = c["linear_conv_kernel_dim"]
        self.conv1d = nn.Conv1d(channels, channels, conv_weight, groups=channels, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.value_heads).uniform_(1, 16).log())
        # A time constant between 1 and 100 tokens for A = 10, as in Mamba.
        step = torch.empty(self.value_heads).uniform_(-6.9, -2.3).exp()
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.norm = GatedRMSNorm(c["linear_value_head_dim"], c["rms_norm_eps"])
        self.out_proj = nn.Linear(self.value_dim, hidden, bias=False)

    def forward(self, x: Tensor, docs: Tensor, visible: Tensor, rope: Tensor) -> Tensor:
        mixed = causal_conv(self.in_proj_qkv(x), self.conv1d.weight.squeeze(1), docs).float()
        q, k, v = mixed.split((self.key_dim, self.key_dim, self.value_dim), -1)
        q, k = (l2_norm(t.unflatten(-1, (self.key_heads, -1))) for t in (q, k))
        v = v.unflatten(-1, (self.value_heads, -1))
        beta = self.in_proj_b(x).float().sigmoid()
        g = -self.A_log.exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        with torch.autocast(x.device.type, enabled=False):
            out = chunked_delta_rule(q, k, v, g, beta, docs, self.chunk)
        out = self.norm(out, self.in_proj_z(x).unflatten(-1, (self.value_heads, -1)))
        return self.out_proj(out.flatten(-2))


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotary embedding of the first dimensions; x: [B, H, T, D], rope: [2, T, rotary]."""
    cos, sin = rope
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, -1)
    return torch.cat((turned * cos + torch.cat((-second, first), -1) * sin, rest), -1)


class Attention(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        hidden, eps = c["hidden_size"], c["rms_norm_eps"]
        self.heads, self.kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        self.head_dim = c["head_dim"]
        self.q_proj = nn.Linear(hidden, 2 * self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, hidden, bias=False)
        self.q_norm, self.k_norm = RMSNorm(self.head_dim, eps), RMSNorm(self.head_dim, eps)

    def forward(self, x: Tensor, docs: Tensor, visible: Tensor, rope: Tensor) -> Tensor:
        q, gate = self.q_proj(x).unflatten(-1, (self.heads, -1)).chunk(2, -1)
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, -1))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        q = rotate(self.q_norm(q).transpose(1, 2), rope).to(v.dtype)
        k = rotate(self.k_norm(k).transpose(1, 2), rope).to(v.dtype)
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible.unsqueeze(1))
        out = out.transpose(1, 2) * gate.sigmoid()
        return self.o_proj(out.flatten(-2))


class MLP(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, c: dict[str, Any], kind: str, chunk: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.post_attention_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.linear_attn = DeltaNet(c, chunk) if kind == "linear_attention" else None
        self.self_attn = Attention(c) if kind == "full_attention" else None
        self.mlp = MLP(c["hidden_size"], c["intermediate_size"])

    def forward(self, x: Tensor, docs: Tensor, visible: Tensor, rope: Tensor) -> Tensor:
        mixer = self.self_attn if self.linear_attn is None else self.linear_attn
        assert mixer is not None
        x = x + mixer(self.input_layernorm(x), docs, visible, rope)
        return x + self.mlp(self.post_attention_layernorm(x))


class DemoModel(nn.Module):
    def __init__(self, config: dict[str, Any], chunk: int = 64) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(DecoderLayer(config, k, chunk) for k in config["layer_types"])
        self.norm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=config["initializer_range"])

    def _rope(self, length: int, device: torch.device) -> Tensor:
        c = self.config["rope_parameters"]
        rotary = int(self.config["head_dim"] * c["partial_rotary_factor"])
        exponents = torch.arange(0, rotary, 2, device=device) / rotary
        angles = torch.arange(length, device=device).outer(c["rope_theta"] ** -exponents)
        angles = torch.cat((angles, angles), -1)
        return torch.stack((angles.cos(), angles.sin()))

    def forward(self, tokens: Tensor, docs: Tensor) -> Tensor:
        """Hidden states after the final norm: [B, T, hidden]."""
        length = tokens.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        visible = (docs.unsqueeze(-1) == docs.unsqueeze(-2)) & causal
        rope = self._rope(length, tokens.device)
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, docs, visible, rope)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embed_tokens.weight)
