"""The live objects of a training: models, optimizers, gradients, random number generators, ranks."""
