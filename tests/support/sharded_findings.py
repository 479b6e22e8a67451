"""Trainings on two ranks that were once saved, restored or continued wrongly. Run by ``launched``.

sharded_findings.py FOLDER [SCENARIO…]: writes what each scenario has found into ``rank-<rank>.json``.
"""

import json
import sys
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from sharded_training import Model, batches_of, begin, end, folder, loss_of, model_of, state_of, train, whole
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate

import dynaquant as dq
from dynaquant.engine import kernels
from dynaquant.engine.quantize import magnitude, moments
from dynaquant.store.run import Run


def adam(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def same(found, wanted):
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def text_of(error):
    return f"{type(error).__name__}: {error}"


def reshard(model):
    """Free the parameters that were gathered, so that modules have their sharded ones."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def loaded(run, model, optimizer):
    """Return whether ``load`` reads this rank's state, the number of parts, and the lengths of tensors in extras."""
    dist.barrier()
    stored = dq.load(run)
    state = {f"model.{name}": tensor for name, tensor in stored["model"].items()}
    for name, slots in stored["optimizer"]["state"].items():
        state.update({f"{name.removeprefix('model.')}.{key}": value for key, value in slots.items()})
    wanted = state_of(model, optimizer)
    parts = Run(run).files()[0][-1].header.parts
    return {
        "same": same({name: state.get(name, torch.zeros(0)) for name in wanted}, wanted),
        "parts": len(parts),
        "extras": [len(tensor) for tensor in stored.get("extra", {}).get("queue", [])],
    }


# A stored tensor as a whole has the shape of what each rank holds of a larger model.


def linear(rows):
    torch.manual_seed(1)
    model = fully_shard(nn.Sequential(nn.Linear(8, rows)))
    optimizer = adam(model)
    model(torch.ones(3, 8)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def larger_model(run):
    model, optimizer = linear(4)
    with dq.Checkpointer(run, model, optimizer, quality="lossless") as ckpt:
        ckpt.save(1).result()
    model, optimizer = linear(8)
    before, found = state_of(model, optimizer), {}
    with dq.Checkpointer(run, model, optimizer, quality="lossless") as ckpt:
        try:
            found["strict"] = ckpt.restore()
        except dq.StateError as error:
            found["strict"] = text_of(error)
        found["unchanged"] = same(state_of(model, optimizer), before)
        found["step"], found["not restored"] = ckpt.restore(strict=False), ckpt.not_restored
        after = state_of(model, optimizer)
        found["weights unchanged"] = all(torch.equal(after[name], before[name]) for name in after if "model." in name)
        ckpt.save(2).result()
    return found | loaded(run, model, optimizer)


# Each rank has other extras, or another state of the optimizer.


def queue(*lengths):
    return {"queue": [torch.full((length,), float(number)) for number, length in enumerate(lengths)]}


def replica(layers):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(layers)))


def extras_of_replicas(layers, lengths, run):
    """lengths: by rank, of the tensors in the queue."""
    model = replica(layers)
    optimizer = adam(model)
    model(torch.ones(3, 512)).square().sum().backward()
    optimizer.step()
    extra = queue(*lengths[dist.get_rank()])
    with dq.Checkpointer(run, model, optimizer, extras={"extra": extra}, quality="lossless") as ckpt:
        ckpt.save(1).result()
    return loaded(run, model, optimizer)


def extras_of_shards(lengths, run, roles=None):
    model = model_of("fsdp")
    optimizer = adam(model)
    train(model, optimizer, 1)
    extra = queue(*lengths[dist.get_rank()])
    with dq.Checkpointer(run, model, optimizer, extras={"extra": extra}, quality="lossless", roles=roles) as ckpt:
        ckpt.save(1).result()
    return loaded(run, model, optimizer)


def other_optimizer_states(run):
    """Rank 1 has trained one layer less, so its optimizer has no state of that layer."""
    model = replica(4)
    optimizer = adam(model)
    model[: 4 - dist.get_rank()](torch.ones(3, 512)).square().sum().backward()
    optimizer.step()
    with dq.Checkpointer(run, model, optimizer, quality="lossless") as ckpt:
        ckpt.save(1).result()
    return loaded(run, model, optimizer)


# A save fails: ``evaluate`` raises in the middle of a forward pass, or one rank fails while all ranks reduce.


def after_failure(model_in, evaluate, fault, run):
    """Compare a training after a save that fails with one without saves. fault: a context for that save.

    Another save comes at the end.
    """

    def trained(ckpt_of=None):
        model = model_in()
        optimizer = adam(model)
        losses, failed, last = [train(model, optimizer, 1)], None, None
        with ckpt_of(model, optimizer) if ckpt_of else nullcontext() as ckpt:
            if ckpt:
                try:
                    with fault():
                        ckpt.save(1).result()
                except (MemoryError, dq.DynaquantError) as error:
                    failed = text_of(error)
            losses += [train(model, optimizer, step) for step in (2, 3)]
            if ckpt:
                last = ckpt.save(3).result().step
        reshard(model)
        return losses, state_of(model, optimizer), failed, last

    losses, state, *_ = trained()
    found, after, failed, last = trained(partial(dq.Checkpointer, run, evaluate=evaluate))
    return {"failed": failed, "losses": found == losses, "state": same(after, state), "last": last}


class Raising:
    """A metric that raises once in a block, at the first call or on the first candidate."""

    def __init__(self, block, on_candidate):
        self.block, self.on_candidate, self.first, self.raised = block, on_candidate, None, False

    def __call__(self, model):
        now = model.blocks[1].up.weight.to_local().clone()
        self.first = now if self.first is None else self.first
        raises = not self.raised and not (self.on_candidate and torch.equal(now, self.first))
        hook = model.blocks[self.block].down.register_forward_pre_hook(self.fail) if raises else None
        try:
            return float(loss_of(model, batches_of(5, 1)[0]))
        finally:
            if hook:
                hook.remove()

    def fail(self, *_):
        self.raised = True
        raise ArithmeticError("bad batch")


def defaults():
    torch.manual_seed(0)
    model = Model()
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def prefetched():
    model = model_of("fsdp")
    first, second = model.blocks
    model.set_modules_to_forward_prefetch([first])
    first.set_modules_to_forward_prefetch([second])
    return model


def raising(model_in, block, on_candidate, run):
    return after_failure(model_in, Raising(block, on_candidate), nullcontext, run)


@contextmanager
def failing_on_rank_1(module, name):
    own = getattr(module, name)
    if dist.get_rank() == 1:
        setattr(module, name, out_of_memory)
    try:
        yield
    finally:
        setattr(module, name, own)


def out_of_memory(*_, **__):
    raise MemoryError("no memory")


def failing(module, name, run):
    metric = dq.LossOn(batches_of(5), loss_of)
    return after_failure(partial(model_of, "fsdp"), metric, partial(failing_on_rank_1, module, name), run)


# Extras hold DTensors.


class Average:
    """A moving average of the weights, as DTensors."""

    def __init__(self, model):
        self.shadow = copies(model)

    def state_dict(self):
        return dict(self.shadow)

    def load_state_dict(self, state):
        for name, tensor in self.shadow.items():
            tensor.copy_(state[name])


def copies(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def sharded_extras(make, run):
    def begun(steps):
        model = model_of("fsdp")
        optimizer = adam(model)
        for step in range(steps):
            train(model, optimizer, step)
        extra = make(model)
        return model, optimizer, extra, getattr(extra, "shadow", extra)

    model, optimizer, extra, tensors = begun(1)
    wanted = whole(tensors)
    with dq.Checkpointer(run, model, optimizer, extras={"average": extra}, quality="lossless") as ckpt:
        ckpt.save(1).result()
    model, optimizer, extra, tensors = begun(2)
    with dq.Checkpointer(run, model, optimizer, extras={"average": extra}, quality="lossless") as ckpt:
        differs, step = not same(whole(tensors), wanted), ckpt.restore()
        restored = same(whole(getattr(extra, "shadow", extra)), wanted)
        ckpt.save(2).result()
    return {"differs": differs, "step": step, "restored": restored} | loaded(run, model, optimizer)


# A frozen parameter is quantized.


def frozen(role, run):
    model = model_of("fsdp")
    model.blocks[0].up.weight.requires_grad_(False)
    optimizer = adam(model)
    train(model, optimizer, 1)
    before, seen = state_of(model, optimizer), []

    def evaluate(judged):
        found = float(loss_of(judged, batches_of(5, 1)[0]))
        reshard(judged)
        seen.append(judged.blocks[0].up.weight.full_tensor().clone())
        return found

    name = "model.blocks.0.up.weight"
    with dq.Checkpointer(run, model, optimizer, evaluate=evaluate, roles={name: role}) as ckpt:
        ckpt.save(1).result()
    dist.barrier()
    stored = dq.load(run)["model"]["blocks.0.up.weight"]
    return {
        "stored is quantized": not torch.equal(stored, before[name]),
        "evaluated as stored": any(torch.equal(each, stored) for each in seen),
        "unchanged": same(state_of(model, optimizer), before),
    }


# A module whose state dict has other tensors than its parameters.


class Fused(nn.Module):
    """A linear layer that its state dict divides into two."""

    def __init__(self):
        super().__init__()
        self.both = nn.Linear(8, 12, bias=False)
        self.register_state_dict_post_hook(self.divide)
        self.register_load_state_dict_pre_hook(self.join)

    def forward(self, inputs):
        return self.both(inputs)

    @staticmethod
    def divide(_, state, prefix, *__):
        rows = gathered(state.pop(f"{prefix}both.weight")).reshape(4, 3, 8)
        state[f"{prefix}first.weight"] = rows[:, :1].reshape(4, 8).contiguous()
        state[f"{prefix}second.weight"] = rows[:, 1:].reshape(8, 8).contiguous()

    @staticmethod
    def join(_, state, prefix, *__):
        first, second = (gathered(state.pop(f"{prefix}{name}.weight")) for name in ("first", "second"))
        state[f"{prefix}both.weight"] = torch.cat([first.reshape(4, 1, 8), second.reshape(4, 2, 8)], 1).reshape(12, 8)


def gathered(tensor):
    return tensor.redistribute(placements=[Replicate()]) if isinstance(tensor, DTensor) else tensor


def hooks(run):
    def begun(seed, steps):
        torch.manual_seed(seed)
        model = fully_shard(nn.Sequential(Fused(), nn.Linear(12, 4)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        for _ in range(steps):
            stepped(model, optimizer)
        return model, optimizer

    def stepped(model, optimizer):
        model(torch.ones(3, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        reshard(model)

    model, optimizer = begun(1, 2)
    with dq.Checkpointer(run, model, optimizer, quality="lossless") as ckpt:
        ckpt.save(1).result()
    other, other_optimizer = begun(2, 0)
    with dq.Checkpointer(run, other, other_optimizer, quality="lossless") as ckpt:
        ckpt.restore()
    restored = same(state_of(other, other_optimizer), state_of(model, optimizer))
    stepped(model, optimizer)
    stepped(other, other_optimizer)
    return {"restored": restored, "continued": same(state_of(other, other_optimizer), state_of(model, optimizer))}


# A run whose frozen tensors are not stored.


def omitted(run):
    def begun(layout):
        model = model_of(layout)
        model.blocks[0].up.requires_grad_(False)
        optimizer = adam(model)
        train(model, optimizer, 1)
        return model, optimizer

    model, optimizer = begun("plain")
    with dq.Checkpointer(run, model, optimizer, roles={"model.blocks.0.up.*": "omit"}) as ckpt:
        ckpt.save(1).result()
    with dq.Checkpointer(run, *begun("fsdp")) as ckpt:
        try:
            return {"strict": ckpt.restore()}
        except Exception as error:
            return {"strict": text_of(error)}


# A Checkpointer that is made before the model is sharded.


def early(run):
    model = model_of("plain")
    with dq.Checkpointer(run, model, adam(model)) as ckpt:
        fully_shard(model)
        try:
            return {"saved": ckpt.save(1).result().step}
        except Exception as error:
            return {"refused": text_of(error)}


# Frozen parameters of replicas get a file of their own, which rank 0 writes.


def frozen_replicas(run):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1000, 2000), nn.Linear(2000, 1000))
    model[0].requires_grad_(False)
    with dq.Checkpointer(run, model, adam(model)) as ckpt:
        for step in (1, 2):
            with torch.no_grad():
                model[1].weight.mul_(1.01)
            ckpt.save(step).result()
    return {"frozen": len(list(run.glob("frozen-*"))), "parts": len(list(run.glob("parts/*")))}


SCENARIOS = {
    "frozen replicas": frozen_replicas,
    "early": early,
    "larger model": larger_model,
    "extras of replicas: longer": partial(extras_of_replicas, 4, [[1000], [2_000_000]]),
    "extras of replicas: much longer": partial(extras_of_replicas, 1, [[1_000_000], [2_000_000]]),
    "extras of replicas: more": partial(extras_of_replicas, 4, [[3], [3, 1_500_000]]),
    "extras of replicas: fewer": partial(extras_of_replicas, 4, [[3, 1_500_000], [3]]),
    "extras of shards: longer": partial(extras_of_shards, [[100, 100], [100, 120]]),
    "extras of shards: fewer": partial(extras_of_shards, [[3, 4], [3]]),
    "extras of shards: bounded": partial(extras_of_shards, [[3, 4], [3]], roles={"extra.*": dq.Bound(absolute=0.1)}),
    "other optimizer states": other_optimizer_states,
    "raising: defaults": partial(raising, defaults, 0, False),
    "raising: not resharded": partial(raising, partial(model_of, "fsdp", False), 1, True),
    "raising: prefetched": partial(raising, prefetched, 0, True),
    "sharded extras: dict": partial(sharded_extras, copies),
    "sharded extras: class": partial(sharded_extras, Average),
    "frozen: weight": partial(frozen, "weight"),
    "frozen: bound": partial(frozen, dq.Bound(absolute=0.2)),
    "hooks": hooks,
    "omitted": omitted,
    "failing: mean squares": partial(failing, kernels, "totals"),
    "failing: weights": partial(failing, magnitude, "_extremes_of"),
    "failing: moments": partial(failing, moments, "run_in_windows"),
}


def main(*names):
    begin()
    found = {}
    for name in names or SCENARIOS:
        try:
            found[name] = SCENARIOS[name](folder() / name.replace(": ", "-").replace(" ", "-"))
        except Exception as error:
            found[name] = {"raised": text_of(error)}
        (folder() / f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))
    end()


main(*sys.argv[2:])
