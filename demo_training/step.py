"""One training step: forward and backward over a batch of short and one of long rows.

The model is so small that launching kernels takes longer than running them. On a GPU the layers
are therefore compiled, and the whole step is captured once and replayed as a CUDA graph.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from .model import DemoModel
from .packing import Packed

Batches = tuple[Packed, Packed]
Backward = Callable[[Batches], Tensor]


def autocast(device: torch.device) -> AbstractContextManager[object]:
    if device.type == "cpu":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


def trained_logits(model: DemoModel, batch: Packed) -> Tensor:
    """Logits at the positions whose next token is trained: [N, vocabulary]."""
    with autocast(batch.tokens.device):
        hidden = model(batch.tokens, batch.docs).flatten(0, 1)
        return model.logits(hidden.index_select(0, batch.where)).float()


def backward(model: DemoModel, batches: Batches) -> Tensor:
    """Add the step's gradients. Returns the mean losses of both batches, without waiting."""
    total = batches[0].weights.sum() + batches[1].weights.sum()
    means = []
    for batch in batches:
        losses = F.cross_entropy(trained_logits(model, batch), batch.targets, reduction="none")
        loss = (losses * batch.weights).sum()
        (loss / total).backward()
        means.append(loss.detach() / batch.weights.sum())
    return torch.stack(means)


def compile_layers(model: DemoModel, batches: Batches) -> None:
    """Compile the layers, once for each kind and row length."""
    for layer in model.layers:
        layer.compile(dynamic=False)
    try:
        backward(model, batches)
        torch.cuda.synchronize()
    except Exception:
        for layer in model.layers:
            layer._compiled_call_impl = None
        raise
    finally:
        model.zero_grad(set_to_none=True)


class GraphedBackward:
    """`backward` as a CUDA graph. It overwrites the gradients, which must not be set to None."""

    def __init__(self, model: DemoModel, batches: Batches) -> None:
        self._inputs = batches
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                model.zero_grad(set_to_none=True)
                backward(model, batches)
            grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
            expected = torch.cat(grads)
        torch.cuda.current_stream().wait_stream(stream)
        model.zero_grad(set_to_none=True)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._means = backward(model, batches)
        self._graph.replay()
        got = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        error = float((got - expected).norm() / expected.norm())
        if not error < 0.01:
            raise RuntimeError(f"the graph's gradients are wrong by {error:.3f}")

    def __call__(self, batches: Batches) -> Tensor:
        for old, new in zip(self._inputs, batches, strict=True):
            for target, source in zip(old, new, strict=True):
                target.copy_(source)
        self._graph.replay()
        return self._means.clone()


def fastest_backward(model: DemoModel, batches: Batches) -> Backward:
    """Compiled and captured where that works, plain otherwise."""

    def plain(batches: Batches) -> Tensor:
        model.zero_grad(set_to_none=True)
        return backward(model, batches)

    if batches[0].tokens.device.type == "cpu":
        return plain
    result: Backward = plain
    for name, prepare in (
        ("compiled", lambda: compile_layers(model, batches)),
        ("captured", lambda: GraphedBackward(model, batches)),
    ):
        started = time.time()
        try:
            result = prepare() or result
            print(f"{name} in {time.time() - started:.0f} s", flush=True)
        except Exception as error:  # whatever goes wrong, training can go on without it
            print(f"not {name}: {type(error).__name__}: {str(error)[:800]}", flush=True)
            model.zero_grad(set_to_none=True)
    return result
