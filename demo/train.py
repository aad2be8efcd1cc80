"""Train a small byte-level transformer on the Python manual, data-parallel; start it with torchrun or anything alike."""

import argparse
import hashlib
import os
import random
import signal
import socket
import threading
import time
from datetime import UTC, datetime
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from checkpoint.client import Client
from eagleeye.collect import progress

STUCK_S = 3.0
"""A rank that is told to end and cannot finish its step in this time, because others are gone, ends without."""


class Transformer(nn.Module):
    """Predicts the next byte from the bytes before it."""

    def __init__(self, width: int, depth: int, heads: int, context: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))

    def forward(self, text_BT: Tensor) -> Tensor:
        """(B, T) bytes -> (B, T, 256) logits."""
        return self.head(self.blocks(self.embed(text_BT) + self.position, mask=self.mask, is_causal=True))


def batch(text: Tensor, size: int, context: int, seed: str) -> tuple[Tensor, Tensor]:
    """Draw `size` passages; the same seed draws the same ones, whatever ran before."""
    starts = random.Random(seed).choices(range(len(text) - context - 1), k=size)
    rows = torch.stack([text[start : start + context + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


def average_gradients(model: nn.Module, loss: Tensor, ending: bool) -> tuple[float, bool]:
    """Replace each gradient by its mean over all ranks, in one all_reduce; return the mean loss and whether a rank is ending."""
    gradients = [p.grad for p in model.parameters()]
    flat = torch.cat([g.flatten() for g in gradients] + [loss.detach().reshape(1), torch.tensor([float(ending)])])
    with progress.collective():
        dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, mean in zip(gradients, flat[:-2].split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))
    return flat[-2].item(), bool(flat[-1].item())


def fingerprint(model: nn.Module) -> str:
    """Hash every bit of the parameters."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def notice_sigterm() -> threading.Event:
    """Return an event that SIGTERM sets, so that the step in hand is finished and saved before the end.

    A handler would wait for a collective to return, which it never does when another rank is dead; a thread does not.
    """
    ending = threading.Event()
    hear, tell = socket.socketpair()
    tell.setblocking(False)
    signal.set_wakeup_fd(tell.fileno())
    signal.signal(signal.SIGTERM, lambda *_: None)

    def listen(hear: socket.socket, tell: socket.socket) -> None:
        while hear.recv(1) != bytes([signal.SIGTERM]):
            pass
        ending.set()
        time.sleep(STUCK_S)
        say("told to end, and the step in hand does not end: leaving it")
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=listen, args=(hear, tell), daemon=True).start()
    return ending


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=25, metavar="STEPS")
    parser.add_argument("--no-cache", action="store_true", help="print the fingerprints of saves without saving")
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    ending = notice_sigterm()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    manual = "\n".join(topics[name] for name in sorted(topics)).encode()
    text = torch.frombuffer(bytearray(manual), dtype=torch.uint8).long()
    model = Transformer(options.width, options.depth, 4, options.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    say(f"rank {rank} of {dist.get_world_size()}, {len(text)} bytes, {sum(p.numel() for p in model.parameters())} parameters")

    state = {"model": model, "optimizer": optimizer}
    client = None if options.no_cache else Client()
    restored = client.load(into=state) if client else None
    if restored:
        where = f"from {restored.source} {restored.holder} in {restored.seconds:.3f} s"
        say(f"restored step {restored.step} {where}, parameters {fingerprint(model)}")

    for step in range(restored.step + 1 if restored else 1, options.steps + 1):
        given, wanted = batch(text, options.batch_size, options.context, f"{options.seed} {step} {rank}")
        loss = functional.cross_entropy(model(given).flatten(0, 1), wanted.flatten())
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        mean_loss, end = average_gradients(model, loss, ending.is_set())
        optimizer.step()
        progress.step(step)
        say(f"step {step} loss {mean_loss:.9g}")
        if end or step % options.save_every == 0:
            handle = client.save(step, state) if client else None
            say(f"saved step {step}, parameters {fingerprint(model)}")
            if end:
                if handle:
                    handle.wait("cached", 5.0)
                say(f"ended in order after step {step}")
                os._exit(128 + signal.SIGTERM)
    dist.destroy_process_group()


def say(line: str) -> None:
    print(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%f}Z {line}", flush=True)


if __name__ == "__main__":
    main()
