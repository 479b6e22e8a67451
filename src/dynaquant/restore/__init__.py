"""One restore: from a checkpoint into the objects of a training, or into plain tensors.

- ``restorer.py``: the stages of a restore, in order
- ``fitting.py``: what of a stored state fits the objects
- ``load_shards.py``: decodes what this rank holds of each tensor
- ``seen_by_rank.py``: which of the tensors that differ between ranks this rank gets
- ``dropped_moments.py``: first moments that the checkpoint does not keep
- ``in_place.py``: fills the tensors of the model and the optimizer in place
- ``stored_checkpoint.py``: a checkpoint opened without its training; decodes tensors on access
- ``model_tensors.py``: compares the weights of a checkpoint with a model alone
- ``load.py``: ``dynaquant.load``: a stored state as plain dictionaries and tensors; ``dynaquant.load_into``: stored
  weights into a model
- ``follow.py``: ``dynaquant.follow``: keeps a model at the newest checkpoint of a run
"""
