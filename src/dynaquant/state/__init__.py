"""The state of a training as a tree of named tensors, and the role of each tensor."""
