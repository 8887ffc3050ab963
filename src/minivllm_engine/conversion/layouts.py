"""Where blocks lie in tensors, for one shape of model: rules and their sections, turned into rows."""

import math
from dataclasses import dataclass

from minivllm_engine.checkpoint.names import expected_tensors
from minivllm_engine.checkpoint.rules import (
    BLOCK_ROWS,
    CANONICAL,
    STYLE_TRANSFORMS,
    TensorRule,
    Transform,
)
from minivllm_engine.conversion.plan import Piece, Rows
from minivllm_engine.model_config.config import ModelConfig

_HOME = {block: rule for rule in CANONICAL for block in rule.blocks}


def block_rows(block: str, config: ModelConfig) -> int:
    return math.prod(getattr(config, field) for field in BLOCK_ROWS[block])


def place_blocks(rule: TensorRule, config: ModelConfig) -> dict[str, Rows]:
    """Return the rows of each block in a tensor of `rule`."""
    placed: dict[str, Rows] = {}
    offset = 0
    for section in rule.sections:
        groups = getattr(config, section.groups) if section.groups else None
        sizes = {block: block_rows(block, config) // (groups or 1) for block in section.blocks}
        stride, at = sum(sizes.values()), offset
        for block, size in sizes.items():
            placed[block] = Rows(at, groups, stride, size) if groups else Rows(at, 1, size, size)
            at += size
        offset += stride * (groups or 1)
    return placed


def num_rows(rule: TensorRule, config: ModelConfig) -> int:
    return sum(block_rows(block, config) for block in rule.blocks)


@dataclass(frozen=True)
class Layouts:
    """Rules resolved for one config and the styles of one source.

    Attributes:
        expected: canonical name -> shape, of every tensor the model can have.
    """

    config: ModelConfig
    styles: frozenset[str]
    expected: dict[str, tuple[int, ...]]

    @classmethod
    def of(cls, config: ModelConfig, styles: frozenset[str]) -> "Layouts":
        shapes = {
            name: tuple(size for _, size in dims) for name, dims in expected_tensors(config).items()
        }
        return cls(config, styles, shapes)

    def target_name(self, block: str, layer: int | None) -> str:
        home = _HOME[block].tensor
        if layer is not None:
            return f"model.layers.{layer}.{home}"
        return home if block == "head" else f"model.{home}"

    def transform(self, block: str) -> Transform:
        for style in self.styles:
            transform = STYLE_TRANSFORMS.get(style, {}).get(block)
            if transform:
                return transform
        return "copy"

    def source_shape(self, rule: TensorRule, layer: int | None) -> tuple[int, ...] | None:
        """Say what a source tensor of `rule` must look like; None where the model has no such part."""
        targets = [self.target_name(block, layer) for block in rule.blocks]
        if any(target not in self.expected for target in targets):
            return None
        tail = self.expected[targets[0]][1:]
        if self.transform(rule.blocks[0]) == "conv_axis":
            tail = tail[::-1]
        return (num_rows(rule, self.config), *tail)

    def pieces(self, rule: TensorRule, source: str, layer: int | None) -> list[Piece]:
        """Say what becomes of a tensor of `rule`, neighbours joined."""
        pieces: list[Piece] = []
        for block, rows in place_blocks(rule, self.config).items():
            target_rows = place_blocks(_HOME[block], self.config)[block]
            # One side may lie in groups where the other does not: both are cut alike.
            groups = math.lcm(rows.groups, target_rows.groups)
            piece = Piece(
                source,
                _cut(rows, groups),
                self.target_name(block, layer),
                _cut(target_rows, groups),
                self.transform(block),
            )
            joined = _join(pieces[-1], piece) if pieces else None
            if joined:
                pieces[-1] = joined
            else:
                pieces.append(piece)
        return pieces


def _cut(rows: Rows, groups: int) -> Rows:
    """The same rows in more groups; only plain ranges are cut."""
    if rows.groups == groups:
        return rows
    assert rows.groups == 1, "layouts of two different groupings never share a block"
    size = rows.size // groups
    return Rows(rows.offset, groups, size, size)


def _join(first: Piece, second: Piece) -> Piece | None:
    """Two pieces as one, where the second follows the first on both sides."""
    if (first.target, first.transform) != (second.target, second.transform):
        return None
    source = _follow(first.source_rows, second.source_rows)
    target = _follow(first.target_rows, second.target_rows)
    if source is None or target is None:
        return None
    return Piece(first.source, source, first.target, target, first.transform)


def _follow(first: Rows, second: Rows) -> Rows | None:
    if first.groups != second.groups or first.offset + first.size != second.offset:
        return None
    size = first.size + second.size
    if first.groups == 1:
        return Rows(first.offset, 1, size, size)
    if first.stride != second.stride:
        return None
    if size == first.stride:
        return Rows(first.offset, 1, size * first.groups, size * first.groups)
    return Rows(first.offset, first.groups, first.stride, size)
