"""One save, from the live training to a committed checkpoint.

- ``allowance.py``: the user's limits: how much quality a save may lose, and by which method
- ``arguments.py``: checks what a Checkpointer is given
- ``presets.py``: what the names of ``quality`` mean
- ``training_budget.py``: what restores have cost the training, and what one checkpoint may lose
- ``schedule.py``: when the next checkpoint is due
- ``movement.py``: how far the weights have moved since the last checkpoint
- ``turn.py``: one call of a Checkpointer at a time
- ``saver.py``: the stages of a save, in order
- ``rank_zero.py``: what only rank 0 does
- ``capture.py``: the state as a tree and live tensors
- ``division.py``: how the tensors are divided among the ranks, and which rank writes what
- ``compressor.py``: how each tensor is stored; the stages are the next eight files
- ``frozen_and_omitted.py``: frozen and omitted tensors, whose values the checkpoint does not hold
- ``unchanged_weights.py``: finds weights that have not changed since the last checkpoint; they keep their levels
- ``exact_moments.py``: notes on moments that are stored exactly, as their optimizer is not known
- ``gradient_statistics.py``: gradients recorded between two saves
- ``prepare.py``: reads the weights once, before the search
- ``moment_tolerances.py``: how coarse first moments may be
- ``assemble.py``: the stored form of every tensor
- ``replicas.py``: shares the writing among ranks that all hold the whole state
- ``timing.py``: seconds of each stage
- ``commit_stage.py``: parent, commit, pruning, report: what the writing thread does
- ``sharded_commit.py``: the same of several ranks: every rank writes a part
- ``background.py``: the writing thread
- ``record.py``: sizes, quality, configuration and time of a save
- ``log_to.py``: sends records to the log, to TensorBoard or to a function
"""
