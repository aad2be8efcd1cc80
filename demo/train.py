"""Train a small byte-level transformer on the Python manual, data-parallel; start it with torchrun or anything alike."""

import argparse
import random
from datetime import UTC, datetime
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from eagleeye.collect import progress


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


def average_gradients(model: nn.Module, loss: Tensor) -> float:
    """Replace each gradient by its mean over all ranks, in one all_reduce; return the mean loss."""
    gradients = [p.grad for p in model.parameters()]
    flat = torch.cat([g.flatten() for g in gradients] + [loss.detach().reshape(1)])
    with progress.collective():
        dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, mean in zip(gradients, flat[:-1].split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))
    return flat[-1].item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    manual = "\n".join(topics[name] for name in sorted(topics)).encode()
    text = torch.frombuffer(bytearray(manual), dtype=torch.uint8).long()
    model = Transformer(options.width, options.depth, 4, options.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    say(f"rank {rank} of {dist.get_world_size()}, {len(text)} bytes, {sum(p.numel() for p in model.parameters())} parameters")

    for step in range(1, options.steps + 1):
        given, wanted = batch(text, options.batch_size, options.context, f"{options.seed} {step} {rank}")
        loss = functional.cross_entropy(model(given).flatten(0, 1), wanted.flatten())
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        mean_loss = average_gradients(model, loss)
        optimizer.step()
        progress.step(step)
        say(f"step {step} loss {mean_loss:.4f}")
    dist.destroy_process_group()


def say(line: str) -> None:
    print(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%f}Z {line}", flush=True)


if __name__ == "__main__":
    main()
