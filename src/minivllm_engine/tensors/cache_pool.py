"""The tensors that outlive a step: KV blocks, conv and recurrent states by slot, and snapshots."""

from collections.abc import Sequence

import torch

from minivllm_engine.model_config.config import ModelConfig
from minivllm_engine.tensors.device_copy import on_device


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
        linear, attention = config.num_linear_layers, config.num_attention_layers

        def memory(num_layers: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.empty((num_layers, *shape), dtype=dtype, device=device)

        # A state's parts of all layers are copied at once, and so lie in one tensor.
        self._states = (
            memory(linear, (num_slots + 1, *conv_shape), dtype),
            memory(linear, (num_slots + 1, *state_shape), state_dtype),
        )
        self._snapshots = (
            memory(linear, (num_snapshots, *conv_shape), dtype),
            memory(linear, (num_snapshots, *state_shape), state_dtype),
        )
        self.conv, self.recurrent = (list(states.unbind(0)) for states in self._states)
        self.conv_snapshots, self.recurrent_snapshots = (
            list(states.unbind(0)) for states in self._snapshots
        )
        self.keys = list(memory(attention, kv_shape, dtype).unbind(0))
        self.values = list(memory(attention, kv_shape, dtype).unbind(0))

    def tensors(self) -> list[torch.Tensor]:
        snapshots = self.conv_snapshots + self.recurrent_snapshots
        return [*self.conv, *self.recurrent, *self.keys, *self.values, *snapshots]

    def save(self, slots: Sequence[int], snapshots: Sequence[int]) -> None:
        """Copy the states of some slots into as many snapshots."""
        _copy_states(self._states, slots, self._snapshots, snapshots)

    def restore(self, snapshots: Sequence[int], slots: Sequence[int]) -> None:
        """Copy some snapshots into as many slots, no two alike."""
        _copy_states(self._snapshots, snapshots, self._states, slots)

    @property
    def num_bytes(self) -> int:
        return _num_bytes(self.tensors())

    def bytes_by_pool(self) -> dict[str, int]:
        """Return bytes that are allocated, by the names of the memory plan's rows."""
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


def _copy_states(
    sources: Sequence[torch.Tensor],
    places: Sequence[int],
    targets: Sequence[torch.Tensor],
    to: Sequence[int],
) -> None:
    if len(places) == 1:
        for source, target in zip(sources, targets, strict=True):
            target[:, to[0]].copy_(source[:, places[0]])
        return
    index = on_device([*to, *places], torch.int64, sources[0].device).view(2, -1)
    for source, target in zip(sources, targets, strict=True):
        target.index_copy_(1, index[0], source.index_select(1, index[1]))
