"""The live objects of a training: models, optimizers, gradients, random number generators.

- ``objects.py``: the objects by name, as a user gives them to ``Checkpointer``
- ``supported.py``: refuses objects that cannot be saved
- ``collect.py``: collects the state of all objects, and splits it again
- ``load_state.py``: loads a state into one object
- ``undo.py``: what loading may change, and is put back if a restore fails
- ``optimizers.py``: an optimizer's state and ε by parameter name; fits a stored state to other parameter groups
- ``expanded.py``: fills tensors whose elements share memory
- ``rng.py``: state of the global random number generators
- ``snapshot.py``: what ``evaluate`` may change and a save puts back
- ``hooks.py``: hooks that ``torch.compile`` leaves alone
- ``gradients.py``: records gradients before each optimizer step
- ``accumulated.py``: ``dynaquant.Gradients``: gradients as an extra, for saves in the middle of an accumulation
- ``updates.py``: which parameters the optimizers update between two saves
- ``first_moments.py``: how each optimizer updates its first moments
- ``moment_uses.py``: which optimizers' moments may be quantized: what one step does with them
- ``moment_correction.py``: corrects first moments that a restore has set to zero
- ``master_weights.py``: finds the master weights of half-precision weights
- ``hash_cache.py``: hashes of tensors that rarely change
- ``packed.py``: small states of many ranks as one tensor of bytes
"""
