"""Two ranks score candidates on batches together, while one has nothing to evaluate or fails, for torchrun.

Usage: torchrun … lockstep_replicas.py FOLDER
"""

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import dynaquant as dq
from dynaquant.engine.forms.form import dequantize
from dynaquant.engine.quantize.grid_weights import GridWeights, grid_weights
from dynaquant.engine.quantize.knobs import SCALES_PER_OCTAVE, GridConfiguration
from dynaquant.ranks.group import Group
from dynaquant.search.displacement import Displacement
from dynaquant.search.judge import PairedJudge
from dynaquant.search.live_model import LiveModel
from dynaquant.search.trials import Trials

LEAST_KEPT = 0.99

BATCHES = torch.arange(20 * 8).view(20, 8) % 16


class Metric:
    """A loss on batches. Counts them, and returns one number too few if told so."""

    def __init__(self) -> None:
        self.calls, self.too_few = 0, 0

    def __call__(self, _: nn.Module) -> float:
        raise AssertionError("it is evaluated on batches")

    def __len__(self) -> int:
        return len(BATCHES)

    def losses(self, model: nn.Module, batches) -> list[float]:
        self.calls += len(batches)
        found = [float(nn.functional.cross_entropy(model(BATCHES[index]), BATCHES[index])) for index in batches]
        return found[self.too_few :]


@dataclass(frozen=True)
class OutOfMemory:
    """A quantizer that has no memory for a candidate."""

    weights: Mapping[str, torch.Tensor]
    quantizer: GridWeights

    def candidate(self, _):
        raise MemoryError("no memory for a candidate")

    def quantize(self, configuration):
        return self.quantizer.quantize(configuration)

    def predict(self, _) -> None:
        return None


class Replica:
    """One rank, whose weights have moved little since they were restored from the coarse grid."""

    def __init__(self) -> None:
        self.group, self.metric = Group(), Metric()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Embedding(16, 16), nn.Linear(16, 16))
        names = ("model.0.weight", "model.1.weight")
        weights = {name: self.model.get_parameter(name.removeprefix("model.")).data for name in names}
        self.quantizer = grid_weights(weights, {}, {}, seed=0)
        exponent = self.quantizer.scale_exponent_for(0.01)
        self.coarse = GridConfiguration(exponent)  # takes the weights back to those restored
        self.fine = GridConfiguration(exponent - 6 * SCALES_PER_OCTAVE)  # keeps their displacement
        self.restored = self.quantizer.quantize(self.coarse)
        for name, stored in self.restored.items():
            step = 2 ** (exponent / SCALES_PER_OCTAVE)
            weights[name].copy_(dequantize(stored)).add_(step / 16 * torch.randn_like(weights[name]))
        self.quantizer = grid_weights(weights, {}, self.quantizer.rungs(self.coarse), seed=0)

    def score(self, configurations, quantizer=None, decided=None) -> dict:
        """Score configurations, one on each rank. Returns the trials or the error of this rank."""
        self.metric.calls = 0
        original, order = [1.0] * len(BATCHES), list(range(len(BATCHES)))
        judge = PairedJudge(LiveModel(self.model), self.metric, False, original, decided or {}, order, self.group)
        quantizer = quantizer or self.quantizer
        displacement = Displacement(quantizer.weights, self.restored)
        # Nothing is clearly above or below such limits, so a candidate takes all batches.
        trials = Trials(quantizer, judge, displacement, math.inf, self.group, per_round=2)
        try:
            trials.score(configurations, LEAST_KEPT)
        except (dq.DynaquantError, MemoryError) as error:
            report = {"error": type(error).__name__, "says": str(error)}
        else:
            report = {"trials": [trial.to_json() | {"seconds": 0} for trial in trials.done]}
        # Collectives still pair up: every rank gets what all send at this place.
        report["in step"] = self.group.all_gather(len(configurations)) == [len(configurations)] * 2
        return report | {"calls": self.metric.calls}


def no_memory() -> torch.Tensor:
    raise MemoryError("no memory for a value")


def main(folder: Path) -> None:
    replica = Replica()
    on_rank_1 = replica.group.rank == 1
    report = {
        "rank 0 skips": replica.score([replica.coarse, replica.fine]),
        "rank 1 skips": replica.score([replica.fine, replica.coarse]),
        "both skip": replica.score([replica.coarse]),
        "no candidate": replica.score(
            [replica.fine], OutOfMemory(replica.quantizer.weights, replica.quantizer) if on_rank_1 else None
        ),
        "no value": replica.score([replica.fine], decided={"model.1.bias": no_memory} if on_rank_1 else {}),
    }
    replica.metric.too_few = int(on_rank_1)
    report["too few numbers"] = replica.score([replica.fine])
    (folder / f"rank-{replica.group.rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
