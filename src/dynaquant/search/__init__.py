"""Search: which configuration the weights of a checkpoint get. The files, in reading order:

- ``manager``: decides at every checkpoint, and carries what one search found to the next.
- ``decision``: what a search finds, and what is decided.
- ``grid_method``: the search for the grid's scale exponent, with ``scale_search``, its search algorithm.
- ``kmeans_method``: the search of the published configurations, with ``space`` (which there are), ``size`` (how large
  each is), ``exhaustive`` and ``neighbourhood`` (its two search algorithms).
- ``trials``: quantizes with a configuration and scores the result; shares the work among ranks.
- ``evaluation``: one evaluation: calls ``evaluate`` on a model with other weights. Also ``LossOn``.
- ``metric``: the user's metric over a whole training: its score for the weights in training, with ``noise``.
- ``judge``: how much worse quantized weights are: by the metric, or by their ``distortion`` if there is no metric.
- ``failures``: what an exception in ``evaluate`` means.
- ``displacement``: how much of the training since a restore a checkpoint keeps.
- ``history``: what earlier searches found.
- ``sensitivity``: how sensitive a metric is to each tensor, for models without gradients.
"""
