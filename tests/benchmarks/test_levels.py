"""The benchmark of the coder of levels: its parents differ by the share that it names, and every case decodes."""

import numpy as np
from levels import DECODE, DELTAS, ENCODE, KEYFRAMES, THREE_VALUES, Row, cases, measure, verdicts

from dynaquant import _native


def test_parents_differ_by_the_share_that_is_named():
    work = cases(100_000)
    assert {name for name, (_, parent) in work.items() if parent is None} == set(KEYFRAMES)
    for name, share in DELTAS.items():
        tensor, parent = work[name]
        assert abs(np.mean(tensor.levels != parent.levels) - share) <= 0.2 * share
    tensor, parent = work[THREE_VALUES]
    assert abs(np.mean(tensor.levels != parent.levels) - 0.11) <= 0.01


def test_all_instructions_code_every_case_in_the_same_bytes():
    rows = measure(200_000, 1)
    assert len(rows) == len(_native.instructions()) * (len(KEYFRAMES) + len(DELTAS) + 1)
    for case in (*KEYFRAMES, *DELTAS, THREE_VALUES):
        assert len({row.coded for row in rows if row.case == case}) == 1


def test_the_slowest_case_decides():
    fast = Row("fast", "avx2", 1_000_000, 1, 0.5e6 / ENCODE, 0.5e6 / DECODE, 1e-5)
    slow = Row("slow", "avx2", 1_000_000, 1, 0.5e6 / ENCODE, 1.1e6 / DECODE, 1e-5)
    plain = Row("plain", "plain", 1_000_000, 1, 1.0, 1.0, 1e-5)
    assert [said[:12] for said in verdicts([fast, plain])] == ["passed: avx2"]
    assert [said[:12] for said in verdicts([fast, slow])] == ["MISSED: avx2"]
