"""One save, from the live training to a committed checkpoint.

- ``arguments.py``: checks what a Checkpointer is given
- ``presets.py``: what the presets of a ``Quality`` mean
- ``training_budget.py``: what restores have cost the training, and what one checkpoint may lose
- ``schedule.py``: when the next checkpoint is due
- ``movement.py``: how far the weights have moved since the last checkpoint
- ``displacements.py``: how far a training has moved each tensor since it began
- ``memory.py``: all that one save remembers for the next
- ``turn.py``: one call of a Checkpointer at a time
- ``saver.py``: the stages of a save, in order
- ``rank_zero.py``: what only rank 0 does
- ``capture.py``: the state as a tree and live tensors; those whose values the checkpoint does not hold
- ``differences.py``: what differs between the ranks, and is stored for each of them
- ``division.py``: how the tensors are divided among the ranks, and which rank writes what
- ``source.py``: what is compressed: the state of a live training, of a file, or a part that another program hands over
- ``training_source.py``: the state of a live training as a source, with the next four files
- ``notes.py``: notes on what a checkpoint holds otherwise than its user might expect, such as infinite weights
- ``gradient_energy.py``: how strong gradients are, and how far the estimate of the loss can be trusted
- ``gradient_alignment.py``: whether gradients are strong where weights are large, as the estimate takes for granted
- ``moment_tolerances.py``: how coarse first moments may be
- ``compressor.py``: how each tensor of a source is stored; the stages are the next three files
- ``unchanged_weights.py``: finds weights that have not changed since the last checkpoint; they keep their levels
- ``judged_averages.py``: averages of weights by the metrics that the user gave for them
- ``assemble.py``: a state as it is to be stored: the form of every tensor
- ``commit_stage.py``: parent, commit, pruning, report: what the writing thread does
- ``background.py``: the writing thread
- ``record.py``: sizes, quality, configuration and time of a save
- ``log_to.py``: sends records to the log, to TensorBoard or to a function
"""
