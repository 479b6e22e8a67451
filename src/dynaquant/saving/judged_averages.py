"""Judges averages of weights by the metrics that the user gave for them (``evaluate_average``)."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from dynaquant.engine.forms.bounded import BoundedTensor
from dynaquant.engine.forms.form import dequantize
from dynaquant.engine.label import Label
from dynaquant.engine.quantize.bounds import average_bounds, quantize_bounded
from dynaquant.ranks.group import Group
from dynaquant.search.decision import Decision
from dynaquant.search.evaluation import Evaluate, degradation
from dynaquant.search.failures import attempt, one_line
from dynaquant.search.live_model import score
from dynaquant.search.scores import MeasuredQuality
from dynaquant.state.wrappers import named_parameters
from dynaquant.training.objects import MAIN

log = logging.getLogger("dynaquant")
HALVINGS = 4
"""How often the error of an average is halved, at most. Each costs about a bit for each value."""


class AverageJudge:
    """Makes the grids of averages finer until the metric loses no more than the weights may.

    metrics: of extras that are modules, by name. objects: of the training, by name. Raises ValueError if a name is not
    that of such an extra, TypeError if ``metrics`` is not a dictionary or has a value that cannot be called.
    """

    def __init__(
        self, metrics: Mapping[str, Evaluate], objects: Mapping[str, Any], higher_is_better: bool, group: Group
    ) -> None:
        if not isinstance(metrics, Mapping):
            raise TypeError(
                f"evaluate_average must be a dictionary of metrics by the name of the extra, such as "
                f"{{'ema': evaluate}}, not {metrics!r}"
            )
        for name, metric in metrics.items():
            if name.partition(".")[0] in MAIN or not isinstance(objects.get(name), nn.Module):
                raise ValueError(
                    f"evaluate_average has a metric for {name!r}, which is no extra that is a module; give the average "
                    f"as extras={{{name!r}: …}}, or judge the model by evaluate"
                )
            if not callable(metric):
                raise TypeError(f"evaluate_average[{name!r}] must be a function of the average, not {metric!r}")
        self._metrics, self._objects = dict(sorted(metrics.items())), objects  # ranks judge in the same order
        self.higher_is_better, self._group = higher_is_better, group

    @property
    def names(self) -> list[str]:
        """The names of the averages that have a metric."""
        return list(self._metrics)

    def judge(
        self,
        decision: Decision,
        forms: Mapping[str, BoundedTensor],
        tensors: Mapping[str, Tensor],
        labels: Mapping[str, Label],
        error: float,
        limit: float,
    ) -> tuple[dict[str, BoundedTensor], Decision]:
        """Return the forms of tensors with those of judged averages, and the decision with what was found. Collective.

        An average whose metric fails, or that no grid stores well enough, is left out of the forms: it is stored
        exactly. forms: with averages at the preset's error. tensors, labels: of the state. error: as for
        ``average_bounds``. limit: the degradation that is allowed.
        """
        found, notes, spent = dict(forms), list(decision.notes), decision.equivalents
        averages: dict[str, MeasuredQuality] = {}
        for name, metric in self._metrics.items():
            module = self._objects[name]
            paths = {f"{name}.{path}": path for path, _ in named_parameters(module)}
            names = [each for each in paths if each in forms and labels[each].role == "average"]
            if not names:
                continue
            original, failed = self._scored(module, metric, {})
            spent += 1
            own: dict[str, BoundedTensor] = {}
            halvings = -1
            while failed is None and not own and halvings < HALVINGS:
                halvings += 1
                tried = {each: forms[each] for each in names}
                if halvings:
                    bounds = average_bounds({each: tensors[each] for each in names}, error / 2**halvings)
                    tried = quantize_bounded(tensors, bounds)
                values = {paths[each]: partial(dequantize, form) for each, form in tried.items()}
                restored, failed = self._scored(module, metric, values)
                spent += 1
                lost = degradation(original, restored, self.higher_is_better)
                # A rank whose metric has failed has no number to compare.
                if failed is None and max(self._group.all_gather(lost)) <= limit:
                    own, averages[name] = tried, MeasuredQuality(original, restored, lost)
            if not own:
                why = failed or f"it loses too much at {2**HALVINGS} times the precision of the preset"
                notes.append(f"the average {name!r} is stored exactly: {why}")
                if self._group.rank == 0:
                    log.warning("%s", notes[-1])
            elif halvings:
                notes.append(f"the average {name!r} needs {2**halvings} times the precision of the preset")
            for each in names:
                found.pop(each)
            found.update(own)
        return found, replace(decision, notes=notes, equivalents=spent, averages=averages)

    def _scored(self, module: nn.Module, metric: Evaluate, values: Mapping[str, Any]) -> tuple[float, str | None]:
        """Return the metric of an average with other values, and why it cannot be used on some rank. Collective."""
        found, error = self._group.run_on_all_ranks(lambda: attempt(lambda: score(module, values, metric)))
        number = math.nan if found is None else found
        problem = one_line(error) or (None if math.isfinite(number) else f"its metric is {number}")
        return number, next((each for each in self._group.all_gather(problem) if each is not None), None)
