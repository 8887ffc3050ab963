"""The tensors that outlive a step: KV blocks, conv and recurrent states by slot, and snapshots."""

from collections.abc import Sequence

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
        conv_snapshots, recurrent_snapshots: as conv and recurrent, [num_snapshots, ...]: copies that no
            step touches.
        sink_slot, sink_block: the entries that padding may read and write; nobody else does.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_slots: int,
        num_blocks: int,
        num_snapshots: int = 0,
        block_size: int,
        dtype: torch.dtype,
        state_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_slots, self.num_blocks, self.block_size = num_slots, num_blocks, block_size
        self.num_snapshots = num_snapshots
        self.device = device
        self.sink_slot, self.sink_block = num_slots, num_blocks
        conv_shape = (config.conv_dim, config.linear_conv_kernel_dim - 1)
        state_shape = (
            config.linear_num_value_heads,
            config.linear_value_head_dim,
            config.linear_key_head_dim,
        )
        kv_shape = (num_blocks + 1, block_size, config.num_key_value_heads, config.head_dim)
        linear, attention = range(config.num_linear_layers), range(config.num_attention_layers)

        def states(count: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
            return [torch.empty((count, *shape), dtype=dtype, device=device) for _ in linear]

        self.conv = states(num_slots + 1, conv_shape, dtype)
        self.recurrent = states(num_slots + 1, state_shape, state_dtype)
        self.conv_snapshots = states(num_snapshots, conv_shape, dtype)
        self.recurrent_snapshots = states(num_snapshots, state_shape, state_dtype)
        self.keys = [torch.empty(kv_shape, dtype=dtype, device=device) for _ in attention]
        self.values = [torch.empty(kv_shape, dtype=dtype, device=device) for _ in attention]

    def tensors(self) -> list[torch.Tensor]:
        snapshots = self.conv_snapshots + self.recurrent_snapshots
        return [*self.conv, *self.recurrent, *self.keys, *self.values, *snapshots]

    def save(self, slots: Sequence[int], snapshots: Sequence[int]) -> None:
        """Copy the states of some slots into as many snapshots."""
        _copy_rows(self.conv, slots, self.conv_snapshots, snapshots)
        _copy_rows(self.recurrent, slots, self.recurrent_snapshots, snapshots)

    def restore(self, snapshots: Sequence[int], slots: Sequence[int]) -> None:
        """Copy some snapshots into as many slots, no two alike."""
        _copy_rows(self.conv_snapshots, snapshots, self.conv, slots)
        _copy_rows(self.recurrent_snapshots, snapshots, self.recurrent, slots)

    @property
    def num_bytes(self) -> int:
        return _num_bytes(self.tensors())

    def bytes_by_pool(self) -> dict[str, int]:
        """Bytes that are allocated, by the names of the memory plan's rows."""
        return {
            "state slots": _num_bytes(self.conv + self.recurrent),
            "snapshots": _num_bytes(self.conv_snapshots + self.recurrent_snapshots),
            "KV blocks": _num_bytes(self.keys + self.values),
        }

    def fill_(self, value: float) -> None:
        """Overwrite everything: tests poison the memory with NaN."""
        for tensor in self.tensors():
            tensor.fill_(value)


def _num_bytes(tensors: list[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _copy_rows(
    sources: list[torch.Tensor], rows: Sequence[int], targets: list[torch.Tensor], to: Sequence[int]
) -> None:
    for source, target in zip(sources, targets, strict=True):
        if len(rows) == 1:
            target[to[0]].copy_(source[rows[0]])
        else:
            device = source.device
            index = torch.tensor(to, device=device), torch.tensor(rows, device=device)
            target.index_copy_(0, index[0], source.index_select(0, index[1]))
