"""Replicas of a data-parallel training, for torchrun. They save, fail and restore, and write the results as JSON.

Usage: torchrun … replicas.py {two,four,metrics} FOLDER
"""

import json
import math
import os
import shutil
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from movement import Movement
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed import all_reduce as bound_early
from torch.nn.parallel import DistributedDataParallel

import dynaquant as dq
from dynaquant.ranks.group import Group

STEPS = 8
"""Training steps between saves."""


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(40, 24), nn.Dropout(0.1), nn.Linear(24, 40))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def metric_of(model: nn.Module) -> Movement:
    return Movement(model, 3.0)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name.removeprefix("module."): w.detach().clone() for name, w in model.state_dict().items()}


def plain(model: nn.Module) -> dict[str, list]:
    """Return the weights as JSON values. Floats keep every bit."""
    return {name: w.tolist() for name, w in weights_of(model).items()}


class Replica:
    """One rank's training: model, optimizer, its own random numbers, and a metric that can be made to fail."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.model = DistributedDataParallel(model_of())
        self.optimizer, self.metric = optimizer_of(self.model), metric_of(self.model.module)
        torch.manual_seed(100 + self.rank)
        self.generator = torch.Generator().manual_seed(200 + self.rank)
        self.gradients: list[list[torch.Tensor]] = []
        self.calls = 0
        self.fails_at = 0
        self.failure: type[Exception] = ZeroDivisionError
        self.share: Callable[[float], float] = float
        """Computes the metric from the rank's own number."""

    def checkpointer(self, folder: Path, **options) -> dq.Checkpointer:
        """A Checkpointer of the published method, unless ``quality`` says otherwise."""
        extras = {"generator": self.generator}
        options = {"quality": dq.Quality(method="published")} | options
        return dq.Checkpointer(folder, self.model, self.optimizer, extras=extras, evaluate=self.evaluate, **options)

    def evaluate(self, model: nn.Module) -> float:
        assert not isinstance(model, DistributedDataParallel)
        self.calls += 1
        if self.calls == self.fails_at:
            raise self.failure(f"made to fail on rank {self.rank}")
        return self.share(self.metric(model))

    def train(self, steps: int = STEPS) -> None:
        self.model.train()
        for _ in range(steps):
            tokens = torch.randint(0, 40, (8,))
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(tokens), tokens).backward()
            self.gradients.append([p.grad.clone() for p in self.model.parameters()])
            self.optimizer.step()

    def save(self, ckpt: dq.Checkpointer, step: int) -> dict:
        """Save. Returns the record or the error of this rank."""
        self.calls = 0
        self.metric.remember()
        before = sorted(path.name for path in ckpt._run.folder.iterdir())
        try:
            record = ckpt.save(step).result()
        except (dq.DynaquantError, MemoryError) as error:
            after = sorted(path.name for path in ckpt._run.folder.iterdir())
            return {"error": type(error).__name__, "says": str(error), "same files": before == after}
        finally:
            dist.barrier()
        ratio = None if math.isnan(record.ratio) else record.ratio
        file = {"ratio": ratio, "keyframe": record.keyframe, "ratios": [each.ratio for each in ckpt.records()]}
        return {"record": record.to_json(), "file": file, "calls": self.calls, "weights": plain(self.model)}

    def draws(self) -> dict:
        """Draw random numbers."""
        return {"torch": torch.rand(4).tolist(), "generator": torch.rand(4, generator=self.generator).tolist()}

    def spoil(self) -> None:
        """Overwrite weights and random number generators."""
        torch.manual_seed(300 + self.rank)
        self.generator.manual_seed(400 + self.rank)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(self.rank)

    def restored(self, ckpt: dq.Checkpointer) -> dict:
        step = ckpt.restore()
        return {"step": step, "weights": plain(self.model), "draws": self.draws()}


def two(folder: Path) -> dict:
    """Save four times, fail twice on rank 1 (on the weights in training, on a candidate), save again, restore."""
    replica = Replica()
    run = folder / "run"
    with replica.checkpointer(run) as ckpt:
        saves = []
        for step in range(1, 5):
            replica.train()
            saves.append(replica.save(ckpt, step))
        if replica.rank == 0:
            torch.save(replica.gradients, folder / "gradients.pt")
        failures = []
        for call in (1, 2):
            replica.train()
            replica.fails_at = call if replica.rank == 1 else 0
            failures.append(replica.save(ckpt, 5))
        replica.train()
        replica.fails_at = 0
        after = replica.save(ckpt, 5)
        draws = replica.draws()
    replica.spoil()
    with replica.checkpointer(run) as ckpt:
        restored = replica.restored(ckpt)
    later = saves_after_a_restore(replica, run, folder / "later")
    grid = saves_on_the_grid(replica, folder / "grid")
    report = {"saves": saves, "failures": failures, "after": after, "draws": draws, "restored": restored}
    return {**report, "later": later, "grid": grid}


def saves_after_a_restore(replica: Replica, run: Path, copy: Path) -> list[dict]:
    """Restore, and save twice after so little training that the old levels would undo it."""
    if replica.rank == 0:
        shutil.copytree(run, copy)
    dist.barrier()
    with replica.checkpointer(copy) as ckpt:
        step = ckpt.restore()
        saves = []
        for later in (1, 2):
            for group in replica.optimizer.param_groups:
                group["lr"] = 5e-5
            replica.train(4)
            saves.append(replica.save(ckpt, step + later))
    return saves


def saves_on_the_grid(replica: Replica, folder: Path) -> list[dict]:
    """Save three times by the default method, restore, and save twice after little training."""
    for group in replica.optimizer.param_groups:
        group["lr"] = 1e-2
    saves = []
    with replica.checkpointer(folder, quality=dq.Quality(method="grid")) as ckpt:
        for step in (1, 2, 3, 4, 5):
            if step == 4:
                saves[-1]["restored"] = ckpt.restore(), plain(replica.model)
                for group in replica.optimizer.param_groups:
                    group["lr"] = 5e-5
            replica.train(4)
            saves.append(replica.save(ckpt, step))
    return saves


def metrics(folder: Path) -> dict:
    """Save with metrics that communicate at every call, at late calls, only to rank 0, or never. Then save once while
    memory runs out on rank 1."""
    replica = Replica()
    rank, generator = replica.rank, replica.generator

    def mean(value: float) -> float:
        total = torch.tensor(value * (1 + rank), dtype=torch.float64)
        dist.all_reduce(total)
        return float(total) / 3

    def late(value: float) -> float:
        return mean(value) if replica.calls > 5 else value  # not yet for the weights in training

    def to_rank_0(value: float) -> float:
        total = torch.tensor(value * (1 + rank), dtype=torch.float64)
        dist.reduce(total, 0)
        return float(total) / 3 if rank == 0 else -1.0

    saves = {}
    for share in (mean, late, to_rank_0, float):
        replica.share = share
        name = share.__name__
        with replica.checkpointer(folder / name, quality=dq.Quality(method="grid")) as ckpt:
            replica.train()
            saves[name] = [replica.save(ckpt, 1)]
            if share is mean:
                replica.train()
                saves[name].append(replica.save(ckpt, 2))
            if share is float:
                replica.train()
                replica.failure, replica.fails_at = MemoryError, 2 if rank == 1 else 0
                drawn = generator.get_state()
                saves["no memory"] = [replica.save(ckpt, 2) | {"same draws": generator.get_state().equal(drawn)}]
    batches = saves_by_a_loss_on_batches(replica, folder)
    return {"seen": {name: seen(way) for name, way in ways().items()}, "saves": saves, "batches": batches}


def saves_by_a_loss_on_batches(replica: Replica, folder: Path) -> dict[str, list[dict]]:
    """Save with losses on batches: one that never communicates (also after a restore), one that fails on rank 1 for a
    candidate, one that communicates for candidates only, and one that has fewer batches on rank 1."""
    tokens = torch.arange(16 * 20).view(20, 16) % 40

    def loss(model: nn.Module, batch: torch.Tensor) -> float:
        replica.calls += 1
        if replica.calls == replica.fails_at:
            raise ZeroDivisionError(f"made to fail on rank {replica.rank}")
        return replica.share(float(nn.functional.cross_entropy(model(batch), batch)))

    def late(value: float) -> float:
        if replica.calls > len(tokens) + 3:  # not yet for the weights in training
            dist.all_reduce(torch.ones(1))
        return value

    replica.share = float
    replica.fails_at, saves = 0, {}
    replica.evaluate = dq.LossOn(tokens, loss)
    with replica.checkpointer(folder / "batches", quality=dq.Quality(method="grid", max_degradation=0.001)) as ckpt:
        saves["same"] = []
        for step in (1, 2, 3, 4):
            if step == 3:
                ckpt.restore()
            replica.train()
            saves["same"].append(replica.save(ckpt, step))
        replica.train()
        replica.fails_at = len(tokens) + 2 if replica.rank == 1 else 0
        saves["failing"] = [replica.save(ckpt, 5)]
        replica.fails_at = 0
    replica.share = late
    with replica.checkpointer(
        folder / "batches late", quality=dq.Quality(method="grid", max_degradation=0.0003)
    ) as ckpt:
        replica.train()
        saves["late"] = [replica.save(ckpt, 1)]
    replica.share = float
    replica.evaluate = dq.LossOn(tokens[: 20 - replica.rank], loss)
    with replica.checkpointer(
        folder / "batches uneven", quality=dq.Quality(method="grid", max_degradation=0.003)
    ) as ckpt:
        replica.train()
        saves["uneven"] = [replica.save(ckpt, 1)]
    return saves


def ways() -> dict[str, Callable[[nn.Module], object]]:
    """Return functions that communicate in different ways, and one that does not."""
    ones, group = torch.ones(2), dist.new_group(backend="gloo")
    alone = [dist.new_group([rank], backend="gloo") for rank in range(2)][dist.get_rank()]
    wrapped = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))

    def in_a_thread(_: nn.Module) -> None:
        thread = threading.Thread(target=dist.all_reduce, args=(ones,))
        thread.start()
        thread.join()

    def to_the_next(_: nn.Module) -> None:
        (dist.send if dist.get_rank() == 0 else dist.recv)(ones, 1 - dist.get_rank())

    return {
        "all_reduce": lambda _: dist.all_reduce(ones),
        "bound early": lambda _: bound_early(ones),
        "all_reduce, not waited for": lambda _: dist.all_reduce(ones, async_op=True).wait(),
        "all_gather": lambda _: dist.all_gather([torch.ones(2), torch.ones(2)], ones),
        "all_gather_object": lambda _: dist.all_gather_object([None, None], 1),
        "all_to_all": lambda _: dist.all_to_all_single(torch.ones(2), ones),
        "broadcast": lambda _: dist.broadcast(ones, 0),
        "barrier": lambda _: dist.barrier(),
        "send and receive": to_the_next,
        "functional": lambda _: functional.all_reduce(ones, "sum", dist.group.WORLD) + 1,
        "another group": lambda _: dist.all_reduce(ones, group=group),
        "a new group": lambda _: dist.new_group(backend="gloo"),
        "buffers of DDP": lambda _: wrapped.eval()(torch.ones(3, 2)),
        "in a thread": in_a_thread,
        "nothing": lambda model: model.eval()(torch.arange(3)),
        "a group of one rank": lambda _: dist.all_reduce(ones, group=alone),
    }


def seen(way: Callable[[nn.Module], object]) -> bool:
    group = Group()
    group.watch_communication(way)(model_of())
    return group.saw_communication()


def four(folder: Path) -> dict:
    """Restore a run of two ranks, start another one, and let ``evaluate`` fail on rank 2 without catching it."""
    replica = Replica()
    with replica.checkpointer(folder / "run") as ckpt:
        replica.spoil()
        own = replica.draws()
        replica.spoil()
        restored = replica.restored(ckpt)
    saves = []
    with replica.checkpointer(folder / "new", every=dq.Auto(max_overhead=0.5)) as ckpt:
        for step in (1, 2, 3):
            replica.train()
            saves.append(replica.save(ckpt, step))
        write(folder, {"own": own, "restored": restored, "saves": saves})
        replica.calls, replica.fails_at = 0, int(replica.rank == 2)
        ckpt.save(4)
    raise AssertionError("the save must have failed")


def write(folder: Path, report: dict) -> None:
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    place = Path(sys.argv[2])
    if sys.argv[1] in ("two", "metrics"):
        write(place, {"two": two, "metrics": metrics}[sys.argv[1]](place))
        dist.destroy_process_group()
    else:
        try:
            four(place)
        except dq.EvaluateError as error:
            os.write(2, f"rank {dist.get_rank()} ends with {error}\n".encode())
            raise
