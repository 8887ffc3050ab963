"""Logits of a checkpoint as transformers computes them, in fp32 and in bf16, by a process of its own.

    python -m support.transformers_logits CHECKPOINT IDS.json OUT.safetensors DEVICE

A process of its own because transformers takes FLA wherever that can be imported, and the engine needs it.
IDS.json: lists of token ids. OUT: for sequence i "fp32.i" and "bf16.i", [num_rows, vocab_size] in fp32, of
the positions that `kept_positions` names.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

TESTS = Path(__file__).parents[1]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def kept_positions(length: int) -> list[int]:
    """Some of the prompt, and the last tokens one by one."""
    return [*range(0, length - 9, 13), *range(max(0, length - 9), length)]


def transformers_logits(
    checkpoint: Path, sequences: Sequence[Sequence[int]], device: str
) -> dict[str, torch.Tensor]:
    """Run this module on the sequences. The checkpoint's directory takes its files."""
    ids, out = checkpoint / "ids.json", checkpoint / "logits.safetensors"
    ids.write_text(json.dumps([list(sequence) for sequence in sequences]))
    command = [sys.executable, "-m", "support.transformers_logits"]
    subprocess.run([*command, str(checkpoint), str(ids), str(out), device], cwd=TESTS, check=True)
    return load_file(out)


def main() -> None:
    from support.transformers_oracle import TransformersOracle

    checkpoint, ids, out, device = sys.argv[1:]
    # Also of convolutions, where torch allows it by default.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    found = {}
    for name, dtype in DTYPES.items():
        oracle = TransformersOracle(Path(checkpoint), dtype)
        oracle.model.to(device)
        for number, sequence in enumerate(json.loads(Path(ids).read_text())):
            rows = kept_positions(len(sequence))
            found[f"{name}.{number}"] = oracle.logits(sequence)[rows].float().cpu().contiguous()
        del oracle
    save_file(found, out)


if __name__ == "__main__":
    main()
