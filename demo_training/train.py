"""Train the demo model on one GPU for a fixed time.

    python -m demo_training.train --checkpoint DIR --out DIR --minutes 9.5

The directory of --checkpoint holds tokenizer.json (see prepare.py). The time counts from the start
of the program. The learning rate follows the elapsed time, so its decay to zero always completes.
--resume continues from the fp32 weights of an earlier --out, or from those of a checkpoint.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.utils.data import DataLoader

from . import shape
from .entries import Dictionary, load_entries
from .export import export_weights, read_weights
from .model import DemoModel
from .monitor import Monitor
from .packing import ChatEncoder, Packed, RowShape, TrainingBatches
from .step import Backward, Batches, fastest_backward

WARM_UP_STEPS = 300
STEPS_AHEAD = 4  # how far the host may run ahead of the GPU; the clock reads the host's time


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument(
        "--resume", type=Path, help="directory with weights-*.pt, or with model.safetensors"
    )
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--decay-share", type=float, default=0.4, help="of the time")
    parser.add_argument("--short", type=int, nargs=2, default=(256, 256), help="rows, length")
    parser.add_argument("--long", type=int, nargs=2, default=(16, 1280), help="rows, length")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--reports", type=int, default=16, help="how often to measure and print")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def build_optimizer(model: DemoModel, learning_rate: float, fused: bool) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [
        {"params": matrices, "weight_decay": 0.05},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=fused)


def rate_factor(step: int, progress: float, decay_share: float) -> float:
    """Warm-up by steps, then flat, then linear to zero over the last part of the time."""
    return max(0.0, min(1.0, (step + 1) / WARM_UP_STEPS, (1.0 - progress) / decay_share))


def on_device(stream: Iterator[Batches], device: torch.device) -> Iterator[Batches]:
    for short, long in stream:
        yield (
            Packed(*(t.to(device, non_blocking=True) for t in short)),
            Packed(*(t.to(device, non_blocking=True) for t in long)),
        )


def save(model: DemoModel, out: Path, statistics: dict[str, object]) -> None:
    """The checkpoint's weights, and the fp32 weights in two files for --resume."""
    export_weights(model, out)
    weights = {name: value.cpu() for name, value in model.state_dict().items()}
    names = list(weights)
    for part in range(2):
        torch.save({n: weights[n] for n in names[part::2]}, out / f"weights-{part}.pt")
    shape.write_json(out / "training.json", statistics)


def run(
    model: DemoModel,
    backward: Backward,
    batches: Iterator[Batches],
    monitor: Monitor,
    seconds: float,
    args: argparse.Namespace,
) -> dict[str, object]:
    on_gpu = torch.cuda.is_available()
    optimizer = build_optimizer(model, args.learning_rate, fused=on_gpu)
    tokens_a_step = args.short[0] * args.short[1] + args.long[0] * args.long[1]
    started, step, reports, progress = time.time(), 0, 0, 0.0
    exact: dict[str, float] = {}
    while progress < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * rate_factor(step, progress, args.decay_share)
        losses = backward(next(batches))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if on_gpu and step % STEPS_AHEAD == 0:
            torch.cuda.synchronize()
        progress = (time.time() - started) / seconds
        if progress * args.reports >= reports + 1:
            reports = int(progress * args.reports)
            exact = monitor.exact_shares(model)
            rate = int(step * tokens_a_step / (time.time() - started))
            means = ", ".join(f"{loss:.4f}" for loss in losses.tolist())
            print(f"{progress:.1%} step {step}, {rate:,} tokens/s, loss {means}", flush=True)
            print("   ", json.dumps(exact), flush=True)
    return {
        "steps": step,
        "tokens": step * tokens_a_step,
        "minutes": round((time.time() - started) / 60, 2),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "learning_rate": args.learning_rate,
        "resumed": args.resume is not None,
        "exact": exact,
    }


def main() -> None:
    started = time.time()
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    dataset = TrainingBatches(
        args.checkpoint, RowShape(*args.short), RowShape(*args.long), args.seed
    )
    ahead = 8 if args.workers else None
    loader = DataLoader(dataset, batch_size=None, num_workers=args.workers, prefetch_factor=ahead)
    stream = iter(loader)  # starts the workers, before anything touches the GPU
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = DemoModel(shape.TEXT_CONFIG).to(device)
    if args.resume:
        parts = sorted(args.resume.glob("weights-*.pt"))
        for part in parts:
            model.load_state_dict(torch.load(part, map_location=device), strict=False)
        if not parts:
            model.load_state_dict(read_weights(args.resume))
    batches = on_device(stream, device)
    backward = fastest_backward(model, next(batches))
    encoder = ChatEncoder(Tokenizer.from_file(str(args.checkpoint / "tokenizer.json")))
    monitor = Monitor(Dictionary(load_entries()), encoder, device)
    seconds = args.minutes * 60 - (time.time() - started)
    statistics = run(model, backward, batches, monitor, seconds, args)
    save(model, args.out, statistics)
    print(json.dumps(statistics))


if __name__ == "__main__":
    main()
