"""Saves with metrics that communicate more or less. Run by ``launched``; "hsdp" on four ranks makes two replicas.

sharded_scoring.py FOLDER LAYOUT

Writes for each metric what each save has tried, and how often this rank evaluated.
"""

import json
import sys

import torch
import torch.distributed as dist
from sharded_training import batches_of, begin, end, folder, loss_of, model_of, train

import dynaquant as dq

HELD_OUT = batches_of(1000, count=12)


def own(model):
    """The loss on held-out batches. Only the forward pass communicates."""
    with torch.no_grad():
        return sum(float(loss_of(model, batch)) for batch in HELD_OUT[:2])


def averaged(model):
    """The loss, averaged over all ranks."""
    loss = torch.tensor(own(model))
    dist.all_reduce(loss)
    return float(loss) / dist.get_world_size()


def with_gradients(model):
    """The loss plus the size of its gradients, which HSDP adds up over replicas."""
    loss = loss_of(model, HELD_OUT[0])
    with torch.enable_grad():
        loss_of(model, HELD_OUT[0]).backward()
    return float(loss.detach())


METRICS = {
    "own": own,
    "averaged": averaged,
    "with_gradients": with_gradients,
    "on_batches": dq.LossOn(HELD_OUT, loss_of),
}


def counted(metric, calls):
    """Return the metric with its calls counted. One on batches must stay one."""
    if isinstance(metric, dq.LossOn):
        losses = metric.losses

        def counted_losses(model, batches):
            calls.append(len(batches) / len(HELD_OUT))
            return losses(model, batches)

        metric.losses = counted_losses
        return metric

    def evaluate(model):
        calls.append(1.0)
        return metric(model)

    return evaluate


def main(layout):
    begin()
    found = {}
    for name, metric in METRICS.items():
        calls = []
        evaluate = counted(metric, calls)
        saves = []
        for restart in range(2):
            model = model_of(layout)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            with dq.Checkpointer(
                folder() / name, model, optimizer, evaluate=evaluate, quality=dq.Quality(max_degradation=0.002), every=2
            ) as ckpt:
                start = ckpt.restore() or 0
                assert start == 4 * restart
                for step in range(start + 1, start + 5):
                    train(model, optimizer, step)
                    if step % 2 == 0:
                        calls.clear()
                        record = ckpt.save(step).result()
                        saves.append(
                            {
                                "configuration": str(record.configuration),
                                "trials": len(record.trials),
                                "equivalents": record.equivalents,
                                "evaluated": sum(calls),
                                "notes": record.notes,
                                "degradation": record.quality.degradation if record.quality else None,
                            }
                        )
        found[name] = saves
    (folder() / f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))
    end()


main(*sys.argv[2:])
