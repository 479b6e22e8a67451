"""Kill or interrupt a training again and again, at random: no checkpoint is lost, and training is unchanged.

The training keeps three checkpoints. It saves some steps twice, and goes back to older ones. With ``kills`` and
``interrupts`` it has one process, and keeps a lossless copy. With ``sharded`` it has one to four ranks under
FSDP2, another number after every kill, and one or more of them are killed.

    python benchmarks/soak.py kills --count 1000
    python benchmarks/soak.py interrupts --count 1000
    python benchmarks/soak.py sharded --count 500

Prints one line for each error that was found. Exits with 1 if there was any.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
from soaking.interrupts import interrupts
from soaking.kills import kills
from soaking.sharded import sharded
from soaking.training import Training

SOAKS = {"kills": kills, "interrupts": interrupts, "sharded": sharded}


def main() -> None:
    """Run the soak that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("soak", choices=SOAKS)
    parser.add_argument("--count", type=int, default=1000, help="kills or interrupts")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    Training().step()  # imports here what each child would otherwise import for itself

    def progress(n: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{n} of {arguments.count}", end="", file=sys.stderr)

    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        counts, errors = SOAKS[arguments.soak](Path(folder) / "run", arguments.count, arguments.seed, progress)
    for name, n in sorted(counts.items()):
        print(f"{n:6} {name}")
    print(f"{time.perf_counter() - begin:6.0f} seconds")
    for text in errors:
        print(f"ERROR: {text}")
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()
