"""The quantizers of tensors that ranks may share, for one that a process holds as a whole."""

from dynaquant.engine.kernels import host
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
    shard = Shard.whole(tensor.shape)
    return log_grid.quantize_to_log_grid(tensor, pace, extremes_of(tensor), threshold, shard, 0.0)


def extremes_of(tensor):
    return host.extremes_from(tensor, log_grid.SMALLEST) if tensor.numel() else log_grid.NO_EXTREMES


def quantize_second_moment(second, tolerance, epsilon=UNKNOWN):
    shard, extremes = Shard.whole(second.shape), extremes_of(second)
    return alone(second_moment.quantize_second_moment(second, tolerance, shard, epsilon, extremes))


def quantize_rank_one(tensor):
    shard = Shard.whole(tensor.shape)
    return alone(second_moment.quantize_rank_one(tensor, sample(tensor, shard), shard, 0.0))


def quantize_first_moment(first, stored_second, second_name, tolerance, epsilon=UNKNOWN):
    return alone(first_moment.quantize_first_moment(first, stored_second, second_name, tolerance, None, epsilon))


def quantize_momentum(first, tolerance):
    return alone(first_moment.quantize_momentum(first, tolerance, Shard.whole(first.shape)))


def within(tensor, bound):
    return alone(bounds.within(tensor, bound, Shard.whole(tensor.shape)))
