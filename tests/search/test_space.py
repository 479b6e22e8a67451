"""The published configurations: from candidates to configurations and back."""

from itertools import pairwise, product

import pytest

import dynaquant as dq
from dynaquant.methods.published.space import Candidate, Space, at_most

BOTH = ("magnitude", "sensitivity")
SPACES = [Space(embeddings, metrics) for embeddings in (True, False) for metrics in (BOTH, BOTH[:1])]
EVERY_SPACE = pytest.mark.parametrize("space", SPACES, ids=str)


def candidates(space: Space, shape=None) -> list[Candidate]:
    points = list(product(*map(range, shape or space.shape)))
    return [Candidate(metric, point) for metric in space.metrics for point in points]


def knobs(configuration: dq.Configuration) -> tuple[float, ...]:
    """Returns the fields as numbers that grow as configurations become more conservative."""
    return (
        configuration.bins,
        configuration.embedding_bins,
        -configuration.pruned,
        configuration.protected,
    )


@EVERY_SPACE
def test_the_space_is_the_published_one(space):
    found = {space.configuration(candidate) for candidate in candidates(space)}
    assert {c.bins for c in found} == {4, 6, 8, 12, 16, 32}
    assert {c.embedding_bins for c in found} == ({16, 32} if space.embeddings else {32})
    assert {c.pruned for c in found} == {0.0, 0.1, 0.2, 0.3, 0.4, 0.5}
    assert {c.protected for c in found} == {0.0005, 0.005, 0.01}
    assert {c.pruning_metric for c in found} == set(space.metrics)


@EVERY_SPACE
@pytest.mark.parametrize("wide", [False, True], ids=["published", "wide"])
def test_a_configuration_leads_back_to_its_candidate(space, wide):
    for candidate in candidates(space, space.wide_shape if wide else space.shape):
        configuration = space.configuration(candidate)
        back = space.candidate(configuration)
        assert back.point == candidate.point
        assert space.configuration(back) == configuration
        assert back.metric == (candidate.metric if configuration.pruned else "magnitude")


@EVERY_SPACE
def test_along_every_axis_configurations_become_more_conservative(space):
    for candidate in candidates(space, space.wide_shape):
        for axis, length in enumerate(space.wide_shape):
            if candidate.point[axis] + 1 < length:
                point = list(candidate.point)
                point[axis] += 1
                before, after = (
                    knobs(space.configuration(candidate)),
                    knobs(space.configuration(Candidate(candidate.metric, tuple(point)))),
                )
                assert after[axis] > before[axis]
                assert after[:axis] + after[axis + 1 :] == before[:axis] + before[axis + 1 :]


def test_if_nothing_is_pruned_the_metric_makes_no_difference():
    space = Space(embeddings=True, metrics=BOTH)
    for candidate in candidates(space):
        other = Candidate(BOTH[candidate.metric == BOTH[0]], candidate.point)
        same = space.configuration(candidate) == space.configuration(other)
        assert same == (space.configuration(candidate).pruned == 0)


@EVERY_SPACE
@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        ({"bins": 5}, {"bins": 6}),
        ({"bins": 1}, {"bins": 4}),
        ({"bins": 33}, {"bins": 64}),
        ({"bins": 200}, {"bins": 254}),
        ({"pruned": 0.25}, {"pruned": 0.2}),
        ({"pruned": 0.9}, {"pruned": 0.5}),
        ({"pruned": 0.01}, {"pruned": 0.0}),
        ({"protected": 0.0}, {"protected": 0.0005}),
        ({"protected": 0.001}, {"protected": 0.005}),
        ({"protected": 0.2}, {"protected": 0.01}),  # the largest value
    ],
)
def test_a_configuration_between_two_points_becomes_the_more_conservative_one(space, knobs, expected):
    start = {"bins": 16, "embedding_bins": 32, "pruned": 0.1, "protected": 0.005}
    configuration = space.configuration(space.candidate(dq.Configuration(**start | knobs)))
    assert configuration == dq.Configuration(**start | expected)


def test_embedding_bins_count_only_if_the_model_has_embeddings():
    configuration = dq.Configuration(embedding_bins=20)
    space = Space(embeddings=True, metrics=BOTH)
    assert space.configuration(space.candidate(configuration)).embedding_bins == 32
    space = Space(embeddings=False, metrics=BOTH)
    assert space.candidate(configuration).point[1] == 0
    assert space.shape[1] == space.wide_shape[1] == 1


def test_an_unavailable_metric_is_replaced():
    space = Space(embeddings=True, metrics=("magnitude",))
    assert space.candidate(dq.Configuration(pruning_metric="sensitivity")).metric == "magnitude"


@EVERY_SPACE
def test_more_bins_come_after_the_most_conservative_corner(space):
    corner = tuple(n - 1 for n in space.shape)
    beyond = space.more_bins
    for a, b in pairwise([corner, *(candidate.point for candidate in beyond)]):
        assert at_most(a, b)
        assert a != b
    configurations = [space.configuration(candidate) for candidate in beyond]
    assert [c.bins for c in configurations] == [64, 128, 254]
    assert [c.embedding_bins for c in configurations] == ([64, 128, 254] if space.embeddings else [32] * 3)
    assert {(c.pruned, c.protected) for c in configurations} == {(0.0, 0.01)}
    assert beyond[-1].point == tuple(n - 1 for n in space.wide_shape)


@EVERY_SPACE
def test_finer_candidates_have_more_bins_and_less_pruning(space):
    for candidate in candidates(space, space.wide_shape):
        before = space.configuration(candidate)
        assert space.finer(candidate, 0, 0) == candidate
        more_bins, less_pruned = space.finer_shape(candidate)
        found = []
        for steps in product(range(more_bins), range(less_pruned)):
            finer = space.configuration(space.finer(candidate, *steps))
            assert all(x <= y for x, y in zip(knobs(before), knobs(finer), strict=True))
            assert finer.protected == before.protected
            if space.embeddings and steps[0]:
                assert finer.embedding_bins >= finer.bins
            found.append((finer.bins, finer.embedding_bins, finer.pruned))
        assert len(set(found)) == len(found)
        assert (found[-1][0], found[-1][-1]) == (254, 0.0)
        assert found[-1][1] == 254 or not space.embeddings or more_bins == 1
