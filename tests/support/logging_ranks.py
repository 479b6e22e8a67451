"""Saves two steps on every rank, with the log on stdout. Run by ``launched``.

logging_ranks.py FOLDER LAYOUT
"""

import logging
import sys

import torch
from sharded_training import begin, end, folder, model_of, train

import dynaquant as dq


def main(layout):
    begin()
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(threadName)s: %(message)s")
    model = model_of(layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with dq.Checkpointer(folder() / "run", model, optimizer) as ckpt:
        for step in (1, 2):
            train(model, optimizer, step)
            ckpt.save(step).result()
    end()


if __name__ == "__main__":
    main(*sys.argv[2:])
