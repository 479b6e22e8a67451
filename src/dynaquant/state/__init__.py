"""The state of a training as a tree of named tensors, and the role of each tensor.

- ``flatten.py``: converts a state to a JSON tree and named tensors, and back
- ``plain_objects.py``: objects in an optimizer's state, taken apart and put together
- ``plain.py``: the part of a state that can be stored
- ``tree.py``: queries on such a JSON tree: the model in it, the tensors that a node names
- ``of_ranks.py``: what differs between the ranks of a training, in such a tree
- ``wrappers.py``: unwraps models and optimizers; names of tensors in the bare model
- ``subclasses.py``: tensor subclasses with a state of their own, such as 4-bit weights, as plain tensors
- ``roles.py``: finds the label of every tensor, averages of weights among them, and applies the user's patterns
"""
