"""A sharded training in which one rank fails. Forks the ranks, and prints what each of them reports, as JSON.

sharded_faults.py FOLDER SCENARIO…

A scenario lists launches, one after another: the number of ranks, and what they do. The last launch of each restores
the run with another number of ranks and goes on.
"""

import json
import os
import signal
import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from full_disk import files_of_at_most
from sharded_training import batches_of, loss_of, model_of, state_of, train
from soaking.children import forked, reports_of
from soaking.ranks import Ranks, import_for
from torch.distributed.tensor import DTensor

import dynaquant as dq
from dynaquant.restore import restorer
from dynaquant.saving import commit_stage
from dynaquant.store import commit
from dynaquant.store.chain import part_paths
from dynaquant.store.commit import WritableRun
from dynaquant.store.container import CheckpointWriter
from dynaquant.store.run import Run
from dynaquant.store.verifying import verify_run

FOLDER = Path()
"""The run of the present scenario."""
LIMIT = 60.0
"""Seconds until a rank counts as hanging. Longer than anything here takes."""
SHORT = 6.0
"""The timeout of the process group, in seconds, where a rank hangs."""


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def replaced(place, name, by):
    """Replace a function of the package. by: gets the function itself, then its arguments."""
    own = getattr(place, name)
    setattr(place, name, lambda *args, **kwargs: by(own, *args, **kwargs))
    try:
        yield
    finally:
        setattr(place, name, own)


def before(place, name, fault, call=1):
    """Let a fault happen before the n-th call of a function."""
    calls = iter(range(1, 1_000_000))

    def faulty(own, *args, **kwargs):
        if next(calls) == call:
            fault()
        return own(*args, **kwargs)

    return replaced(place, name, faulty)


def after(place, name, fault):
    """Let a fault happen after a function has returned."""

    def faulty(own, *args, **kwargs):
        result = own(*args, **kwargs)
        fault()
        return result

    return replaced(place, name, faulty)


def rename_of(step, fault, when):
    """Kill rank 0 before or after it gives the file of a step its name, which is the commit."""

    def faulty(own, run, written, path):
        if path != run.path(step):
            return own(run, written, path)
        if when == "before":
            fault()
        result = own(run, written, path)
        fault()
        return result

    return replaced(WritableRun, "_rename", faulty)


@contextmanager
def full_disk():
    with files_of_at_most(2000):
        yield


class Metric:
    """The loss on held-out batches. ``fault``, if there is one, gets the loss from a given call on."""

    def __init__(self):
        self.calls, self.at, self.fault, self.deserts = 0, 0, None, False

    def __call__(self, model):
        model.eval()
        if self.deserts:
            raise ArithmeticError("no score")
        with torch.no_grad():
            found = sum(float(loss_of(model, batch)) for batch in batches_of(10_000))
        self.calls += 1
        return self.fault(found) if self.fault and self.calls >= self.at else found


class Training:
    """A training under FSDP2, or in a process of its own."""

    def __init__(self, ranks, **options):
        torch.set_num_threads(1)
        self.model = model_of("fsdp" if ranks > 1 else "plain")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.metric = Metric()
        self.ckpt = dq.Checkpointer(FOLDER, self.model, self.optimizer, evaluate=self.metric, **options)

    def step(self, number):
        train(self.model, self.optimizer, number)

    def local(self):
        """Return copies of everything this rank holds: weights, buffers, moments, gradients."""
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        tensors.update({f"{n}.grad": p.grad for n, p in self.model.named_parameters() if p.grad is not None})
        for name, parameter in self.model.named_parameters():
            tensors.update({f"{name}.{key}": value for key, value in self.optimizer.state.get(parameter, {}).items()})
        return {n: (t.to_local() if isinstance(t, DTensor) else t).detach().clone() for n, t in tensors.items()}


def equal(found, wanted):
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def in_words(error):
    return f"{type(error).__name__}: {error}"


def saving(ranks, failing, fault, rank, report, options=None, saves=2, goes_on=False):
    """Save steps 1, 2, …; at the last save, the failing rank runs it within ``fault``. Reports errors, and closes.

    goes_on: save once more after that.
    """
    training = Training(ranks, **{"quality": "lossless", **(options or {})})
    for step in range(1, saves + 1 + goes_on):
        training.step(step)
        faulty = rank == failing and step == saves
        try:
            if faulty:
                with fault():
                    training.ckpt.save(step).result()
            else:
                training.ckpt.save(step).result()
            report(["saved", step])
        except Exception as error:
            report(["failed", step, in_words(error)])
            if not goes_on:
                break
            try:  # otherwise the next save raises the error once more
                training.ckpt.wait()
            except Exception as again:
                report(["wait", in_words(again)])
    try:
        training.ckpt.close()
    except Exception as error:
        report(["close", in_words(error)])
    report(["closed"])


def resuming(ranks, _, report, options=None, saves=2):
    """Restore the newest, compare it with what a process of its own reads, and save twice."""
    training = Training(ranks, **{"quality": "lossless", **(options or {})})
    start = training.ckpt.restore()
    left = sorted(path.name for path in FOLDER.rglob("*.tmp"))
    parts = {path.stem for path in (FOLDER / "parts").glob("*.dqc")}
    left += sorted(parts - {part.address for file in Run(FOLDER).files()[0] for part in file.header.parts})
    report(["restored", start, [str(error) for error in training.ckpt.skipped], left])
    stored = dq.load(FOLDER, start)
    wanted = {f"model.{name}": tensor for name, tensor in stored["model"].items()}
    for name, slots in stored["optimizer"]["state"].items():
        wanted.update({f"{name.removeprefix('model.')}.{key}": value for key, value in slots.items()})
    found = state_of(training.model, training.optimizer)
    report(["as stored", all(torch.equal(found[name], wanted[name]) for name in found)])
    for step in range(start + 1, start + 1 + saves):
        training.step(step)
        training.ckpt.save(step).result()
        report(["saved", step])
    training.ckpt.close()


def restoring(ranks, failing, fault, rank, report):
    """Restore; the failing rank does it within ``fault``. Reports whether an error has left everything as it was."""
    training = Training(ranks, quality="lossless")
    training.step(1)
    present = training.local()
    try:
        with fault() if rank == failing else replaced(os, "getpid", lambda own: own()):
            report(["restored", training.ckpt.restore()])
    except Exception as error:
        report(["failed", 0, in_words(error), equal(training.local(), present)])
    training.ckpt.close()
    report(["closed"])


def asked_for(step, ranks, _, report):
    """Restore the newest, then a step that is damaged."""
    training = Training(ranks, quality="lossless")
    report(["restored", training.ckpt.restore(), [str(error) for error in training.ckpt.skipped]])
    try:
        training.ckpt.restore(step)
    except dq.CheckpointError as error:
        report(["failed", step, in_words(error)])
    training.ckpt.close()


def evaluating(ranks, failing, at, fault, rank, report):
    """Save with a metric that fails on one rank from its n-th call on, between a backward pass and a step.

    Reports whether the save has changed anything, and whether the training is what it would be without saves.
    """
    training, alone = Training(ranks, quality=dq.Quality(max_degradation=0.05)), Training.__new__(Training)
    alone.model = model_of("fsdp")
    alone.optimizer = torch.optim.AdamW(alone.model.parameters(), lr=3e-3)
    for step in (1, 2):
        for each in (training, alone):
            each.step(step)
            loss_of(each.model, batches_of(-step, 1)[0]).backward()
        present = training.local()
        if step == 2:
            training.metric.at = training.metric.calls + at
            training.metric.fault = fault if rank == failing else None
        try:
            record = training.ckpt.save(step).result()
            report(["saved", step, record.identity, record.notes])
        except Exception as error:
            report(["failed", step, in_words(error)])
        report(["unchanged", equal(training.local(), present)])
    training.metric.fault = None
    for each in (training, alone):
        each.step(3)
    report(["saved", 3, training.ckpt.save(3).result().identity])
    report(["undisturbed", equal(training.local(), alone.local())])
    training.ckpt.close()


def raises(_):
    raise ArithmeticError("no score")


def deserting(ranks, rank, report):
    """Save with a metric that raises on rank 1 before it takes part in the forward pass, so that others wait for it."""
    training = Training(ranks, quality=dq.Quality(max_degradation=0.05))
    training.step(1)
    training.ckpt.save(1).result()
    training.step(2)
    present = training.local()
    if rank == 1:
        training.ckpt.wait()
        training.metric.deserts = True
    try:
        training.ckpt.save(2)
    except Exception as error:
        report(["failed", 2, in_words(error)])
    report(["unchanged", equal(training.local(), present)])
    training.ckpt.close()
    report(["closed"])


def slow(found):
    time.sleep(0.3)
    return found


def damage(name, _, report):
    """Damage a part of step 2, or delete it."""
    path = part_paths(Run(FOLDER).file(2))[1]
    if name == "missing":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[len(data) // 3] ^= 1
        path.write_bytes(data)
    report(["done"])


PRUNES = {"quality": "lossless", "keep": dq.Keep(last=2, keyframe_every=4)}
SAVES = {  # the failing rank of three, and its fault during a save
    "writes": (1, partial(before, CheckpointWriter, "finish", killed)),
    "rank 0 writes": (0, partial(before, CheckpointWriter, "finish", killed)),
    "has written": (2, partial(after, commit_stage, "write_part", killed)),
    "before the commit": (0, partial(rename_of, 2, killed, "before")),
    "after the commit": (0, partial(rename_of, 2, killed, "after")),
    "begins": (0, partial(before, WritableRun, "begin", killed)),
}
PRUNING = {  # the same while step 4 is saved, and retention re-codes a delta and deletes the step before
    "re-codes": (0, partial(before, commit, "write_part", killed)),
    "re-codes its second part": (0, partial(before, commit, "write_part", killed, 2)),
    "has re-coded": (0, partial(after, WritableRun, "recode", killed)),
    "deletes": (0, partial(before, WritableRun, "delete_unneeded", killed, 3)),
    "waits for retention": (1, partial(after, commit_stage, "write_part", killed)),
}
RESTORES = {
    "reads": (1, partial(before, restorer, "load_shards", killed)),
    "rank 0 chooses": (0, partial(before, WritableRun, "summaries", killed)),
    "has read": (2, partial(after, restorer, "load_shards", killed)),
    "fills": (1, partial(before, restorer, "load_objects", killed)),
}
EVALUATES = {"raises": raises, "nan": lambda _: float("nan"), "slow": slow}


def hangs(ranks, rank, report):
    """Rank 1 never ends its write."""

    def forever():
        report(["hangs"])
        time.sleep(10 * LIMIT)

    saving(ranks, 1, partial(before, commit_stage, "write_part", forever), rank, report)


def launches_of(scenario):
    """Return for each launch: the number of ranks, what they do, and the timeout of their process group."""
    kind, _, name = scenario.partition(": ")
    save, resume = (3, partial(saving, 3, -1, None), LIMIT), (2, partial(resuming, 2), LIMIT)
    if kind == "save":
        return [(3, partial(saving, 3, *SAVES[name]), LIMIT), resume]
    if kind == "retention":
        act = partial(saving, 3, *PRUNING[name], options=PRUNES, saves=4)
        return [(3, act, LIMIT), (2, partial(resuming, 2, options=PRUNES), LIMIT)]
    if kind == "restore":
        return [save, (3, partial(restoring, 3, *RESTORES[name]), LIMIT), (1, partial(resuming, 1), LIMIT)]
    if kind == "part":
        return [save, (1, partial(damage, name), LIMIT), (2, partial(asked_for, 2, 2), LIMIT), resume]
    if kind == "evaluate":
        how, _, at = name.partition(" at ")
        return [(2, partial(evaluating, 2, 1, int(at), EVALUATES[how]), LIMIT), (3, partial(resuming, 3), LIMIT)]
    if scenario == "full disk":
        return [(3, partial(saving, 3, 1, full_disk, goes_on=True), LIMIT), resume]
    act = partial(deserting if scenario == "deserts" else hangs, 3)
    return [(3, act, SHORT), (1, partial(resuming, 1), LIMIT)]


def imported():
    """Build a training, so that forks need not import what it uses."""
    model = model_of("fsdp")
    train(model, torch.optim.AdamW(model.parameters()), 1)


def verified(report):
    """Report what ``dynaquant verify`` finds, and the steps in their order."""
    report([Run(FOLDER).steps(), [str(error) for _, error in verify_run(Run(FOLDER)) if error]])


def launch(count, act, timeout):
    """Run a launch. Returns what each rank has reported, who was killed, and who has not ended in time."""
    ranks = Ranks(count, act, timeout)
    if timeout == SHORT:
        ranks.wait(lambda: all(rank.ended for rank in ranks.ranks if not rank.last("hangs")), LIMIT)
        hanging = [rank for rank in ranks.ranks if not rank.ended and rank.last("hangs")]
        for rank in hanging:
            rank.kill()
    late = ranks.end(LIMIT)
    child, reader = forked(verified)
    (steps, damaged), *_ = reports_of(reader)
    os.waitpid(child, 0)
    return {
        "reports": [rank.reports for rank in ranks.ranks],
        "killed": [number for number, rank in enumerate(ranks.ranks) if rank.killed],
        "late": late,
        "steps": steps,
        "damaged": damaged,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    import_for(imported)
    found = {}
    for n, scenario in enumerate(sys.argv[2:]):
        FOLDER = Path(sys.argv[1]) / f"run-{n}"
        found[scenario] = [launch(*each) for each in launches_of(scenario)]
    print(json.dumps(found))
