"""A training to be killed. For every line of input, it forks a process that saves in a loop and reports each save."""

import os
import sys

import torch
import torch._dynamo  # a Checkpointer imports it, which takes longer than what each forked process does
from torch import nn

import dynaquant as dq

OPTIONS = {
    "grid": {},
    "published": {
        "quality": dq.Quality(configuration=dq.Configuration(bins=4, protection_metric="magnitude"), method="published")
    },
}


def build(folder: str, method: str) -> tuple[nn.Module, dq.Checkpointer]:
    """Return a model of 51,200 weights, and a Checkpointer for it. The training stores the step in the bias."""
    model = nn.Linear(256, 200)
    return model, dq.Checkpointer(folder, model, keep=dq.Keep(last=3, keyframe_every=3), **OPTIONS[method])


def say(word: str, number: int) -> None:
    os.write(1, f"{word} {number}\n".encode())


def train(folder: str, method: str) -> None:
    torch.set_num_threads(1)
    model, ckpt = build(folder, method)
    step = ckpt.restore() or 0
    say("restored", step)
    while True:
        step += 1
        with torch.no_grad():
            model.weight += 0.01 * torch.randn_like(model.weight)
            model.bias.fill_(step)
        say("saving", step)
        ckpt.save(step).result()
        say("committed", step)


if __name__ == "__main__":
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            say("started", os.getpid())  # the first line that a child writes is its own process number
            train(*sys.argv[1:])
        os.waitpid(child, 0)
        say("ended", 0)
