"""The quantizers of tensors that ranks may share, for one that a process holds as a whole."""

from dynaquant.engine.quantize import bounds, first_moment, log_grid, second_moment
from dynaquant.engine.quantize.epsilon import Epsilon
from dynaquant.engine.quantize.log_grid import POSITIONS_PER_RUNG, Threshold
from dynaquant.engine.quantize.moment_sample import sample
from dynaquant.engine.reduction import alone
from dynaquant.engine.tensors.shard import Shard

UNKNOWN = Epsilon()


def quantize_to_log_grid(tensor, pace, threshold=None):
    """By default, values go to the nearest power."""
    threshold = threshold or Threshold(POSITIONS_PER_RUNG * pace // 2)
    extremes, shard = log_grid.extremes_of(tensor), Shard.whole(tensor.shape)
    return log_grid.quantize_to_log_grid(tensor, pace, extremes, threshold, shard, 0.0)


def quantize_second_moment(second, tolerance, epsilon=UNKNOWN):
    return alone(second_moment.quantize_second_moment(second, tolerance, Shard.whole(second.shape), epsilon))


def quantize_rank_one(tensor):
    shard = Shard.whole(tensor.shape)
    return alone(second_moment.quantize_rank_one(tensor, sample(tensor, shard), shard, 0.0))


def quantize_first_moment(first, stored_second, second_name, tolerance, epsilon=UNKNOWN):
    return alone(first_moment.quantize_first_moment(first, stored_second, second_name, tolerance, None, epsilon))


def quantize_momentum(first, tolerance):
    return alone(first_moment.quantize_momentum(first, tolerance, Shard.whole(first.shape)))


def within(tensor, bound):
    return alone(bounds.within(tensor, bound, Shard.whole(tensor.shape)))
