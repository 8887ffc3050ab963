"""The tensors that outlive a step: KV blocks, and conv and recurrent states by slot."""

import torch

from minivllm_engine.model_config import ModelConfig


class CachePool:
    """All cache memory of one model, allocated once. One more slot and block than planned: the sinks.

    Nothing here is initialised: whoever reads an entry has written it before. The model reads and
    writes through the tensors; ids are handed out by the block manager and the state manager.

    Attributes:
        conv: one tensor a DeltaNet layer, [num_slots + 1, conv_dim, kernel - 1] in the model's dtype:
            the last raw inputs of the causal convolution, oldest first.
        recurrent: one tensor a DeltaNet layer, [num_slots + 1, HV, V, K] in the state's dtype.
        keys, values: one tensor an attention layer, [num_blocks + 1, block_size, num_kv_heads, head_dim]
            in the model's dtype; keys after norm and rotary embedding.
        sink_slot, sink_block: the entries that padding may read and write; nobody else does.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_slots: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        state_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_slots, self.num_blocks, self.block_size = num_slots, num_blocks, block_size
        self.device = device
        self.sink_slot, self.sink_block = num_slots, num_blocks
        conv_shape = (num_slots + 1, config.conv_dim, config.linear_conv_kernel_dim - 1)
        state_shape = (
            num_slots + 1,
            config.linear_num_value_heads,
            config.linear_value_head_dim,
            config.linear_key_head_dim,
        )
        kv_shape = (num_blocks + 1, block_size, config.num_key_value_heads, config.head_dim)
        linear, attention = range(config.num_linear_layers), range(config.num_attention_layers)
        self.conv = [torch.empty(conv_shape, dtype=dtype, device=device) for _ in linear]
        self.recurrent = [
            torch.empty(state_shape, dtype=state_dtype, device=device) for _ in linear
        ]
        self.keys = [torch.empty(kv_shape, dtype=dtype, device=device) for _ in attention]
        self.values = [torch.empty(kv_shape, dtype=dtype, device=device) for _ in attention]

    def tensors(self) -> list[torch.Tensor]:
        return [*self.conv, *self.recurrent, *self.keys, *self.values]

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def fill_(self, value: float) -> None:
        """Overwrite everything: tests poison the memory with NaN."""
        for tensor in self.tensors():
            tensor.fill_(value)
