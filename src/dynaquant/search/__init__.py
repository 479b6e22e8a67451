"""Search: finds a configuration for the weights of each checkpoint. The files, in reading order:

- ``manager``: decides at every checkpoint; each search goes on from the memory of the last one. What a method prepares.
- ``search_memory``: what one search remembers for the next, among it the results of earlier ones.
- ``scores``: what a record keeps of a search: the quality of the weights, and the trials.
- ``decision``: the result of a search, and the decision for a checkpoint.
- ``trials``: quantizes with a configuration and scores the result; shares the work among ranks.
- ``search_log``: logs how long a search will take, and that it still goes on.
- ``live_model``: the model of a training as a subject: other weights for one evaluation, training as before.
- ``evaluation``: the metric that a user gives, and what it scores; ``LossOn``, and ``OnBatches``.
- ``metric``: the user's metric over a whole training: its score for the weights in training, with ``noise``.
- ``sight``: whether the metric sees the weights at all.
- ``stepped_search``: searches by a metric that may turn out to move in steps too coarse for what may be lost.
- ``judge``: measures how much worse quantized weights are, by the metric, or else by their ``distortion``.
- ``sequential_test``: tells from a few batches whether a candidate is good enough.
- ``failures``: sorts exceptions in ``evaluate`` by their cause.
- ``displacement``: how much of the training since a restore a checkpoint keeps.
- ``sensitivity``: how sensitive a metric is to each tensor, for models without gradients.
"""
