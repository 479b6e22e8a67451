"""Trainings on two ranks that do not see, hold or do the same. Run by ``launched``.

ranks_apart.py FOLDER [SCENARIO…]: writes what each scenario has found into ``rank-<rank>.json``.
ranks_apart.py FOLDER waiting CASE: the same of one case in which ranks wait in vain.
"""

import json
import os
import sys
import time
from functools import partial

import torch
import torch.distributed as dist
from sharded_training import batches_of, begin, end, folder, loss_of, model_of, state_of, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import dynaquant as dq
from dynaquant.store.run import Run


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def text_of(action):
    """Return the error that an action raises, as text, or its result."""
    try:
        return action()
    except (dq.DynaquantError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


# Ranks do not see the same folder.


def disagreeing(run):
    """Ranks with other roles, other steps, and without a process group any more."""
    rank = dist.get_rank()
    found = [text_of(lambda: dq.Checkpointer(run, nn.Linear(4, 4), roles={"model.bias": "weight"} if rank else {}))]
    with dq.Checkpointer(run, nn.Linear(4, 4)) as checkpointer:
        found.append(text_of(lambda: checkpointer.save(5 + rank)))
        checkpointer.save(7).result()
    return [*found, dq.load(run, 7) is not None]


def own_folders(layout, run):
    model = model_of(layout)
    return text_of(lambda: dq.Checkpointer(run / f"rank-{dist.get_rank()}", model, adam(model)))


def other_checkpoints(layout, run):
    """Rank 1 sees another run of the same steps from the moment on at which the Checkpointer is open."""
    for seed in (1, 2):
        model = model_of(layout)
        optimizer = adam(model)
        train(model, optimizer, seed)
        with dq.Checkpointer(run / f"run-{seed}", model, optimizer) as ckpt:
            ckpt.save(10).result()
    link = run / f"seen-by-{dist.get_rank()}"
    link.symlink_to(run / "run-1")
    before = state_of(model, optimizer)
    with dq.Checkpointer(link, model, optimizer) as ckpt:
        if dist.get_rank() == 1:
            link.unlink()
            link.symlink_to(run / "run-2")
        found = text_of(ckpt.restore)
    after = state_of(model, optimizer)
    return {"restored": found, "unchanged": all(torch.equal(after[name], before[name]) for name in before)}


# Ranks hold different values.


class Position:
    """The position of a loader: its state differs between ranks, also in its form."""

    def __init__(self, rank):
        self.next, self.order = 5 * rank + 2, torch.arange(3 + rank)

    def state_dict(self):
        return {"next": self.next, "order": self.order, **({"late": [1.5]} if self.next > 5 else {})}

    def load_state_dict(self, state):
        self.next, self.order = state["next"], state["order"]


class Divided(Position):
    """The same, of a loader that can divide its position among another number of ranks."""

    def load_state_of_ranks(self, states):
        self.next, self.order = sum(each["next"] for each in states), torch.cat([each["order"] for each in states])


class Experts(nn.Module):
    """A layer that all ranks hold alike, and an expert of each rank."""

    def __init__(self, width):
        super().__init__()
        self.shared, self.expert = nn.Linear(width, width), nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x):
        return self.norm(self.shared(x)) + self.expert(x)


class Apart:
    """A training whose ranks share one layer only. All else differs: expert, momentum, statistics, extras."""

    def __init__(self, width=16, sharded=False, apart=True, **options):
        rank = dist.get_rank() if dist.is_initialized() else 0
        torch.manual_seed(7)
        self.model = Experts(width)
        self.apart = apart
        if apart:
            torch.manual_seed(rank)
            nn.init.normal_(self.model.expert.weight)
        if sharded:
            fully_shard(self.model, ignored_params=set(self.model.expert.parameters()))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.extras = {"loader": Position(rank), "divided": Divided(rank), "memory": {"seen": torch.ones(2) * rank}}
        self.options = options

    def open(self, run):
        return dq.Checkpointer(run, self.model, self.optimizer, extras=self.extras, **self.options)

    def step(self, number):
        rank = dist.get_rank() if dist.is_initialized() and self.apart else 0
        torch.manual_seed(10 * number + rank)
        self.model(torch.randn(8, self.model.norm.num_features)).square().mean().backward()
        if dist.is_initialized():
            for parameter in self.model.shared.parameters():
                if not isinstance(parameter, DTensor):
                    dist.all_reduce(parameter.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for extra in self.extras.values():
            if isinstance(extra, dict):
                extra["seen"] += 1
            else:
                extra.next += 1

    def state(self):
        """Return all that this rank holds."""
        found = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{name}.{key}"] = value.full_tensor() if isinstance(value, DTensor) else value
        for name, extra in self.extras.items():
            state = extra if isinstance(extra, dict) else extra.state_dict()
            found |= {f"{name}.{key}": torch.as_tensor(value) for key, value in state.items()}
        return {name: tensor.detach().clone() for name, tensor in found.items()}


def apart(saves, options, run):
    """Save, restore into a fresh training, and go on with both."""
    training = Apart(**options)
    with training.open(run) as ckpt:
        for number in range(saves):
            training.step(number)
            record = ckpt.save(number).result()
    wanted = training.state()
    fresh = Apart(**options)
    with fresh.open(run) as ckpt:
        step, found = ckpt.restore(), fresh.state()
        exact = options.get("quality") == "lossless" or options.get("keep", dq.Keep()).lossless_copy
        alike = ("shared", "norm.weight", "norm.bias") if options.get("sharded") else ("shared",)
        differing = [name for name in wanted if exact or not name.startswith(alike)]
        wrong = [n for n in differing if n not in found or not torch.equal(found[n], wanted[n])]
        for number in range(saves, saves + 2):
            fresh.step(number)
            ckpt.save(number).result()
    if exact:
        for number in range(saves, saves + 2):
            training.step(number)
        last, goes_on = training.state(), fresh.state()
        wrong += [f"then {name}" for name in last if not torch.equal(goes_on[name], last[name])]
    header = Run(run).files()[0][-1].header
    return {
        "step": step,
        "wrong": wrong,
        "differs": sorted(entry.name for entry in header.entries if entry.name.startswith("ranks.")),
        "sharded": bool(header.parts),
        "noted": any("differ between ranks" in note for note in record.notes),
    }


def later(run):
    """The ranks hold the same at first, then not, then the same again."""
    training = Apart(apart=False, quality="lossless")
    training.extras = {}
    found = []
    with training.open(run) as ckpt:
        for number in range(5):
            training.step(number)
            with torch.no_grad():
                training.model.expert.weight += dist.get_rank() * (number in (2, 3))
                if number == 4:
                    dist.broadcast(training.model.expert.weight, 0)
            ckpt.save(number).result()
            dist.barrier()
            names = Run(run).file(number).header.by_name
            found.append([name for name in names if name.startswith("ranks.")])
            dist.barrier()
    return found


def broadcast_buffers(run):
    """DDP sets buffers to those of rank 0, so others are not stored."""
    training = Apart(apart=False)
    training.extras = {}
    training.model = DistributedDataParallel(training.model)
    with training.open(run) as ckpt:
        torch.manual_seed(dist.get_rank())
        training.model(torch.randn(8, 16)).square().mean().backward()
        training.optimizer.step()
        ckpt.save(1).result()
    dist.barrier()
    return [name for name in Run(run).file(1).header.by_name if name.startswith("ranks.")]


# Ranks wait for one that does something else.

SECONDS = 5
"""The timeout of the process group where a rank waits in vain."""


def waiting(case, run):
    """case: what only rank 0 does: a Checkpointer, a forward pass in evaluate, an evaluate that takes long, a save."""
    if case == "constructor" and dist.get_rank() > 0:
        time.sleep(2 * SECONDS)
        return None
    model = model_of("fsdp" if case == "forward" else "plain")
    optimizer = adam(model)
    train(model, optimizer, 1)

    def evaluate(judged):
        if dist.get_rank() > 0:
            return 1.0
        if case == "forward":
            return float(loss_of(judged, batches_of(5, 1)[0]))
        time.sleep(2 * SECONDS)
        return 1.0

    ckpt = text_of(lambda: dq.Checkpointer(run, model, optimizer, evaluate=evaluate if case != "save" else None))
    if case == "constructor":
        return ckpt
    if case == "save" and dist.get_rank() > 0:
        time.sleep(2 * SECONDS)
        return None
    return text_of(lambda: ckpt.save(1).result())


def average_whose_metric_fails_on_one_rank(run):
    """Rank 1 cannot evaluate the candidate of an average. Returns what the record says."""
    model = model_of("plain")
    average, calls = AveragedModel(model), []

    def metric(module):
        calls.append(module)
        if dist.get_rank() == 1 and len(calls) > 1:
            raise ValueError("no metric here")
        return 1.0

    extras, metrics = {"ema": average}, {"ema": metric}
    with dq.Checkpointer(run / "run", model, adam(model), extras=extras, evaluate_average=metrics) as ckpt:
        record = ckpt.save(10).result()
    return {"averages": list(record.averages), "notes": record.notes}


# Ranks give different objects, or hold different values where they may not.


def other_objects(run):
    """The constructor's errors, and what rank 1 gets back of an extra that only it has."""
    rank = dist.get_rank()

    def parts(extras, parameters):
        model = nn.Linear(4, 4)
        chosen = [*model.parameters()][parameters]
        return dq.Checkpointer(run, model, torch.optim.AdamW(chosen), extras=extras, quality="lossless")

    everything = slice(None)
    found = [
        text_of(lambda: parts({"log": {}} if rank == 0 else {}, everything)),
        text_of(lambda: parts({}, slice(rank, None, 2))),
    ]
    extras = {"log": {"seen": [1, 2]}} if rank == 1 else {}
    with parts(extras, everything) as ckpt:
        ckpt.save(1).result()
        if rank == 1:
            extras["log"]["seen"] = []
        found.append([ckpt.restore(), extras])
    return found


def islands(same, run):
    """Each rank is a mesh of its own, and trains on data of its own, but for what an average makes equal."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("island", "shard"))["shard"]
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(8, 8), mesh=mesh)
    optimizer = adam(model)
    model(torch.full((3, 8), 1.0 if same else 1.0 + rank)).square().sum().backward()
    optimizer.step()
    with dq.Checkpointer(run, model, optimizer, quality="lossless") as ckpt:
        return text_of(lambda: ckpt.save(1).result().step)


def moved_apart(run):
    """The weights of the ranks move at different speed. Returns the steps at which a checkpoint was due."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    found = []
    with dq.Checkpointer(run, model, every=dq.Moved(0.05)) as ckpt:
        for step in range(100):
            with torch.no_grad():
                model.weight.mul_(1 + 0.001 * (1 + dist.get_rank()))
            if ckpt.due(step):
                found.append(step)
                ckpt.save(step).result()
    return found


def metric_of_one_rank(batches, run):
    """``evaluate`` returns 0 on rank 1. Returns the degradation in the record, and that of what was stored."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = torch.randn(256, 8)
    wanted = inputs @ torch.randn(8, 4)

    def loss(module, at=slice(None)):
        return nn.functional.mse_loss(module(inputs[at]), wanted[at])

    for _ in range(200):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()

    def whole(module):
        return float(loss(module)) if dist.get_rank() == 0 else 0.0

    def of_batch(module, at):
        return loss(module, at) if dist.get_rank() == 0 else torch.zeros(())

    evaluate = whole
    if batches:
        evaluate = dq.LossOn([slice(i, i + 16) for i in range(0, 256, 16)], of_batch)
    with dq.Checkpointer(run, model, optimizer, evaluate=evaluate) as ckpt:
        record = ckpt.save(1).result()
        ckpt.wait()
    dist.barrier()
    before = float(loss(model).detach())
    model.load_state_dict(dq.load(run)["model"])
    after = float(loss(model).detach())
    return {"recorded": record.degradation, "true": after / before - 1, "notes": record.notes, "limit": record.limit}


def gradients_not_reduced(run):
    """FSDP2 accumulates gradients without adding them up over the ranks."""
    model = fully_shard(nn.Linear(8, 8))
    optimizer = adam(model)
    model.set_requires_gradient_sync(False)
    with dq.Checkpointer(run, model, optimizer) as ckpt:
        model(torch.ones(3, 8)).square().sum().backward()
        notes = ckpt.save(1).result().notes
    return [notes, text_of(lambda: dq.Checkpointer(run, model, extras={"gradients": dq.Gradients(model)}))]


class Rows(torch.optim.Optimizer):
    """Keeps a mean of each row of a gradient, a DTensor of another shape than the parameter."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            rows = parameter.grad.square().mean(-1)
            state = self.state[parameter]
            state["rows"] = state["rows"] + rows if "rows" in state else rows


def state_of_another_shape(run):
    """Restored before and after the first step of a new optimizer."""

    def new():
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(8, 8, bias=False))
        return model, Rows(model.parameters())

    def step(model, optimizer):
        model(torch.ones(3, 8)).square().sum().backward()
        optimizer.step()
        return optimizer.state[model.weight]["rows"]

    model, optimizer = new()
    rows = step(model, optimizer).to_local().clone()
    with dq.Checkpointer(run, model, optimizer, quality="lossless") as ckpt:
        ckpt.save(1).result()
    model, optimizer = new()
    with dq.Checkpointer(run, model, optimizer, quality="lossless") as ckpt:
        found = [text_of(ckpt.restore)]
        step(model, optimizer).to_local().zero_()
        found.append(text_of(ckpt.restore))
    restored = optimizer.state[model.weight]["rows"]
    return [*found, isinstance(restored, DTensor) and torch.equal(restored.to_local(), rows)]


def restored_in_part(run):
    """Rank 1's new optimizer has all parameters, as the stored one, rank 0's has not."""

    def new():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        return model, torch.optim.AdamW(model[0].parameters())

    model, optimizer = new()
    optimizer.add_param_group({"params": [*model[1].parameters()]})
    model(torch.ones(3, 64)).square().sum().backward()
    optimizer.step()
    with dq.Checkpointer(run, model, optimizer) as ckpt:
        ckpt.save(1).result()
    model, optimizer = new()
    with dq.Checkpointer(run, model, optimizer) as ckpt:
        if dist.get_rank() == 1:
            optimizer.add_param_group({"params": [*model[1].parameters()]})
        return [ckpt.restore(strict=False), bool(ckpt.not_restored)]


SCENARIOS = {
    "restored in part": restored_in_part,
    "other objects": other_objects,
    "islands: apart": partial(islands, False),
    "islands: the same": partial(islands, True),
    "moved": moved_apart,
    "metric of one rank": partial(metric_of_one_rank, False),
    "metric of one rank, on batches": partial(metric_of_one_rank, True),
    "gradients": gradients_not_reduced,
    "another shape": state_of_another_shape,
    "disagreeing": disagreeing,
    "average": average_whose_metric_fails_on_one_rank,
    "apart: small": partial(apart, 3, {}),
    "apart: lossless": partial(apart, 3, {"quality": "lossless"}),
    "apart: copy": partial(apart, 2, {"keep": dq.Keep(lossless_copy=True)}),
    "apart: published": partial(apart, 2, {"quality": dq.Quality(method="published")}),
    "apart: sharded": partial(apart, 3, {"sharded": True, "quality": "lossless"}),
    "apart: sharded, quantized": partial(apart, 3, {"sharded": True}),
    "later": later,
    "broadcast buffers": broadcast_buffers,
    **{f"own folders: {layout}": partial(own_folders, layout) for layout in ("plain", "fsdp")},
    **{f"other checkpoints: {layout}": partial(other_checkpoints, layout) for layout in ("plain", "fsdp")},
}


def main(*names):
    if names and names[0] == "waiting":
        begin(SECONDS)
        found = waiting(names[1], folder() / "run")
        (folder() / f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))
        os._exit(0)  # the other rank does not answer any more
    begin()
    found = {}
    for name in names or SCENARIOS:
        run = folder() / name.replace(": ", "-").replace(" ", "-")
        run.mkdir(exist_ok=True)
        try:
            found[name] = SCENARIOS[name](run)
        except Exception as error:
            found[name] = {"raised": f"{type(error).__name__}: {error}"}
        (folder() / f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))
    end()


if __name__ == "__main__":
    main(*sys.argv[2:])
