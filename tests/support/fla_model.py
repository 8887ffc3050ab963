"""A Gated DeltaNet language model with the names, layout and formulas of Flash Linear Attention 0.6.

Written from FLA's sources (fla/layers/gated_deltanet.py, fla/models/gated_deltanet), one token a step:
norms multiply by w, q, k and v have a convolution each, and no layer is attention.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn


def fla_config(**changes: Any) -> dict[str, Any]:
    """Values twice as wide as keys, two value heads to a key head, the MLP's width left to its default."""
    return {
        "architectures": ["GatedDeltaNetForCausalLM"],
        "model_type": "gated_deltanet",
        "allow_neg_eigval": False,
        "attn": None,
        "attn_mode": "chunk",
        "conv_size": 4,
        "expand_v": 2.0,
        "head_dim": 16,
        "hidden_act": "swish",
        "hidden_ratio": 4,
        "hidden_size": 64,
        "intermediate_size": None,
        "max_position_embeddings": 2048,
        "norm_eps": 1e-5,
        "num_heads": 2,
        "num_hidden_layers": 3,
        "num_v_heads": 4,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "use_gate": True,
        "use_short_conv": True,
        "vocab_size": 320,
        "eos_token_id": None,
        **changes,
    }


class _Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class _Attention(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.heads = config["num_heads"]
        self.value_heads = config["num_v_heads"] or self.heads
        self.k = config["head_dim"]
        self.v = int(self.k * config["expand_v"])
        keys, values = self.heads * self.k, self.value_heads * self.v
        self.q_proj = nn.Linear(hidden, keys, bias=False)
        self.k_proj = nn.Linear(hidden, keys, bias=False)
        self.v_proj = nn.Linear(hidden, values, bias=False)
        self.a_proj = nn.Linear(hidden, self.value_heads, bias=False)
        self.b_proj = nn.Linear(hidden, self.value_heads, bias=False)
        self.A_log = nn.Parameter(torch.zeros(self.value_heads))
        self.dt_bias = nn.Parameter(torch.zeros(self.value_heads))
        size = config["conv_size"]
        for name, width in (("q", keys), ("k", keys), ("v", values)):
            conv = nn.Conv1d(width, width, size, groups=width, padding=size - 1, bias=False)
            setattr(self, f"{name}_conv1d", conv)
        self.g_proj = nn.Linear(hidden, values, bias=False)
        self.o_norm = _Norm(self.v, config["norm_eps"])
        self.o_proj = nn.Linear(values, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, hidden]."""
        length = x.shape[0]

        def mixed(projection: nn.Linear, conv: nn.Conv1d, heads: int) -> torch.Tensor:
            out = conv(projection(x).t()[None])[0, :, :length].t()
            return F.silu(out).view(length, heads, -1)

        q = mixed(self.q_proj, self.q_conv1d, self.heads)
        k = mixed(self.k_proj, self.k_conv1d, self.heads)
        v = mixed(self.v_proj, self.v_conv1d, self.value_heads)
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
        repeats = self.value_heads // self.heads
        q, k = (t.repeat_interleave(repeats, dim=1) for t in (q, k))
        beta = self.b_proj(x).sigmoid()
        g = -self.A_log.exp() * F.softplus(self.a_proj(x) + self.dt_bias)
        state = torch.zeros(self.value_heads, self.k, self.v)
        outs = []
        for t in range(length):
            state = state * g[t].exp()[:, None, None]
            predicted = torch.einsum("hkv,hk->hv", state, k[t])
            update = (v[t] - predicted) * beta[t][:, None]
            state = state + torch.einsum("hk,hv->hkv", k[t], update)
            outs.append(torch.einsum("hkv,hk->hv", state, q[t] * self.k**-0.5))
        out = self.o_norm(torch.stack(outs)) * F.silu(self.g_proj(x).view(length, -1, self.v))
        return self.o_proj(out.flatten(1))


class _MLP(nn.Module):
    def __init__(self, hidden: int, wide: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, wide, bias=False)
        self.up_proj = nn.Linear(hidden, wide, bias=False)
        self.down_proj = nn.Linear(wide, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Block(nn.Module):
    def __init__(self, config: dict[str, Any], wide: int) -> None:
        super().__init__()
        self.attn_norm = _Norm(config["hidden_size"], config["norm_eps"])
        self.attn = _Attention(config)
        self.mlp_norm = _Norm(config["hidden_size"], config["norm_eps"])
        self.mlp = _MLP(config["hidden_size"], wide)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class _Backbone(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        wide = int(hidden * config["hidden_ratio"] * 2 / 3)
        wide = config["intermediate_size"] or 256 * ((wide + 255) // 256)
        self.embeddings = nn.Embedding(config["vocab_size"], hidden)
        self.layers = nn.ModuleList(
            _Block(config, wide) for _ in range(config["num_hidden_layers"])
        )
        self.norm = _Norm(hidden, config["norm_eps"])


class FlaModel(nn.Module):
    """Weights are random, and off their neutral values, so that every one of them shows in the logits."""

    def __init__(self, config: dict[str, Any], seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.model = _Backbone(config)
        self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("A_log"):
                parameter.data = torch.rand(parameter.shape, generator=generator) * 3 - 2
            elif name.endswith("dt_bias"):
                parameter.data = 0.7 * noise - 1
            elif "norm" in name:
                parameter.data = 1 + 0.3 * noise
            elif "conv1d" in name:
                parameter.data = 0.5 * noise
            else:
                parameter.data = noise * parameter.shape[-1] ** -0.5

    @torch.no_grad()
    def forward(self, token_ids: list[int]) -> torch.Tensor:
        """[T, vocab_size]."""
        x = self.model.embeddings(torch.tensor(token_ids))
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(self.model.norm(x))

    def save(self, path: Path) -> Path:
        """As FLA's save_pretrained does: names of the module, one file."""
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(self.config))
        tensors = {name: t.detach().contiguous() for name, t in self.state_dict().items()}
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path
