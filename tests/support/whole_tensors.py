"""The quantizers that are reductions, for a tensor that one process holds as a whole."""

from dynaquant.engine.quantize import bounds, first_moment, second_moment
from dynaquant.engine.quantize.epsilon import UNKNOWN
from dynaquant.engine.quantize.moment_sample import sample
from dynaquant.engine.reduction import alone
from dynaquant.engine.tensors.shard import Shard


def quantize_second_moment(second, tolerance, epsilon=UNKNOWN):
    return alone(second_moment.quantize_second_moment(second, tolerance, epsilon=epsilon))


def quantize_rank_one(tensor):
    values = sample(tensor, Shard.whole(tensor.shape))
    return alone(second_moment.quantize_rank_one(tensor, values))


def quantize_first_moment(first, stored_second, second_name, tolerance, epsilon=UNKNOWN):
    return alone(first_moment.quantize_first_moment(first, stored_second, second_name, tolerance, epsilon=epsilon))


def quantize_momentum(first, tolerance):
    return alone(first_moment.quantize_momentum(first, tolerance))


def within(tensor, bound):
    return alone(bounds.within(tensor, bound))
