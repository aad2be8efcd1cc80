"""Train a small byte-level transformer on the Python manual, data-parallel; start it with torchrun or anything alike."""

import argparse
import contextlib
import hashlib
import mmap
import os
import random
import signal
import socket
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
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


class Oddities:
    """What real jobs do beside plain steps, each by an option of its own; none of it unless asked for."""

    def __init__(self, options: argparse.Namespace, rank: int) -> None:
        self._options, self._rank = options, rank
        self._cache = torch.randint(0, 256, (options.cache_mb << 20,), dtype=torch.uint8)
        self._file = options.data_dir / os.environ.get("EAGLEEYE_NODE", "") / "data" if options.data_dir else None

    def size(self) -> int:
        """Passages of the batch now."""
        if self._options.batch_file and self._options.batch_file.exists():
            return int(self._options.batch_file.read_text())
        return int(self._options.batch_size)

    def load(self) -> None:
        """Read here and there in the cache; write a little to the disk and wait until it is there."""
        if pages := len(self._cache) // mmap.PAGESIZE:
            self._cache[torch.randint(0, pages, (pages // 2,)) * mmap.PAGESIZE].sum()
        if self._file:
            with self._file.open("wb") as file:
                file.write(os.urandom(self._options.data_bytes))
                file.flush()
                os.fdatasync(file.fileno())

    def wait(self, size: int) -> None:
        """Wait as long as an accelerator would compute: longer for larger batches."""
        if self._options.pace:
            time.sleep(self._options.pace * size / self._options.batch_size)

    def after(self, step: int, model: nn.Module, text: Tensor) -> None:
        """Evaluate, or let rank 0 write a whole copy while the others wait for it, when it is time."""
        options = self._options
        if options.eval_every and step % options.eval_every == 0:
            with self._phase("eval"), torch.no_grad():
                until_s = time.monotonic() + options.eval_seconds
                for n in range(10**9):
                    given, _ = batch(text, options.batch_size, options.context, f"eval {n} {self._rank}")
                    model(given)
                    time.sleep(options.pace / 3)
                    if time.monotonic() > until_s:
                        break
        if options.copy_every and step % options.copy_every == 0 and (self._rank == 0 or options.copy_all):
            with self._phase("checkpoint"):
                until_s = time.monotonic() + options.copy_seconds
                while time.monotonic() < until_s:
                    self.load()
                    time.sleep(0.05)

    def idle(self, model: nn.Module, text: Tensor) -> None:
        """Never train: sleep, or answer requests that come now and then, on each rank by itself."""
        draw = random.Random(f"{self._options.seed} {self._rank}")
        while self._options.idle == "sleep":
            time.sleep(1.0)
        with torch.no_grad():
            while True:
                time.sleep(draw.expovariate(1.0))
                model(batch(text, draw.randint(1, 32), self._options.context, str(draw.random()))[0])

    def _phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._options.untold else progress.phase(name)


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
    odd = parser.add_argument_group("oddities")
    odd.add_argument("--pace", type=float, default=0.0, metavar="S", help="wait in each step, as if an accelerator computed")
    odd.add_argument("--data-dir", type=Path, metavar="DIR", help="each step writes a file to DIR/NODE")
    odd.add_argument("--data-bytes", type=int, default=32768, metavar="N", help="size of that file; default %(default)s")
    odd.add_argument("--cache-mb", type=int, default=0, metavar="MB", help="held in memory, a part of it read in each step")
    odd.add_argument("--eval-every", type=int, default=0, metavar="STEPS")
    odd.add_argument("--eval-seconds", type=float, default=8.0, metavar="S")
    odd.add_argument("--copy-every", type=int, default=0, metavar="STEPS", help="how often rank 0 writes a whole copy")
    odd.add_argument("--copy-seconds", type=float, default=8.0, metavar="S", help="how long that takes")
    odd.add_argument("--copy-all", action="store_true", help="every rank writes a copy")
    odd.add_argument("--batch-file", type=Path, metavar="FILE", help="once it is there, the batch has the size that it says")
    odd.add_argument("--untold", action="store_true", help="tell steps only, not phases")
    odd.add_argument("--idle", choices=("sleep", "serve"), help="do not train at all")
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

    oddities = Oddities(options, rank)
    if options.idle:
        oddities.idle(model, text)

    state = {"model": model, "optimizer": optimizer}
    client = None if options.no_cache else Client()
    restored = client.load(into=state) if client else None
    if restored:
        where = f"from {restored.source} {restored.holder} in {restored.seconds:.3f} s"
        say(f"restored step {restored.step} {where}, parameters {fingerprint(model)}")

    for step in range(restored.step + 1 if restored else 1, options.steps + 1):
        oddities.load()
        size = oddities.size()
        given, wanted = batch(text, size, options.context, f"{options.seed} {step} {rank}")
        loss = functional.cross_entropy(model(given).flatten(0, 1), wanted.flatten())
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        oddities.wait(size)
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
        oddities.after(step, model, text)
    dist.destroy_process_group()


def say(line: str) -> None:
    print(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%f}Z {line}", flush=True)


if __name__ == "__main__":
    main()
