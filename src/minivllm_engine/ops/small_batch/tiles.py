"""How much of a weight one program of a small-batch product takes, and how much at a time."""

from dataclasses import dataclass, replace

from minivllm_engine.ops.device import DeviceLimits

# With more rows than this, multiplying takes longer than reading the weights.
MAX_ROWS = 8
_PROGRAMS_PER_PROCESSOR = 2


@dataclass(frozen=True, slots=True)
class Tile:
    """What of a weight [out, in] a program holds in registers at a time; its loop runs along `in`.

    Attributes:
        num_outputs: rows of the weight, all that the program computes. A power of two.
        num_inputs: columns. A power of two.
        num_warps: warps that share a tile.
        num_registers: that a thread may use if there is one row, of numbers of two bytes. Left to itself
            the compiler saves registers where that gains nothing, and so waits for some inputs before it
            asks for the others.
    """

    num_outputs: int
    num_inputs: int
    num_warps: int = 4
    num_registers: int | None = None


# From the most rows to the fewest. 8,192 numbers of two bytes are 16 KB on their way for each program, of
# which several share a multiprocessor; fewer would not keep the memory busy.
TILES = (Tile(8, 1024), Tile(4, 2048, num_registers=128), Tile(2, 4096, num_registers=128))


def choose_tile(num_outputs: int, num_inputs: int, limits: DeviceLimits) -> Tile:
    """Return the tile with the most rows that still gives every multiprocessor two programs.

    Args:
        num_outputs, num_inputs: of the weight.
    """
    wanted = _PROGRAMS_PER_PROCESSOR * limits.num_processors
    fitting = (tile for tile in TILES if -(-num_outputs // tile.num_outputs) >= wanted)
    tile = next(fitting, TILES[-1])
    padded = 1 << (num_inputs - 1).bit_length()
    return replace(tile, num_inputs=min(tile.num_inputs, padded))
