"""Checkpoint files: round trips, and an error message for every fault that a file can have."""

import random
import re
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import zstandard
from crafted import MAGIC, entry, file_of, header, quantized, to_json, write
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from training import bits
from whole_tensors import quantize_first_moment, quantize_rank_one

import dynaquant as dq
from dynaquant.engine.forms.scheme import MAX_EXPANSION
from dynaquant.engine.forms.schemes import (
    BytePlanes,
    Conditional,
    Lossless,
    RankOneFactors,
    Raw,
    Rearranged,
    Reference,
    SecondMomentUnits,
)
from dynaquant.engine.label import Label
from dynaquant.engine.quantize.kmeans_weights import kmeans_weights, quantize_weights
from dynaquant.engine.quantize.knobs import Configuration
from dynaquant.engine.tensors.dtypes import DTYPES
from dynaquant.engine.tensors.element_types import ITEM_SIZES
from dynaquant.errors import CheckpointError
from dynaquant.report.inspection import tensors_of
from dynaquant.state.flatten import flatten, unflatten
from dynaquant.store.commit import WritableRun
from dynaquant.store.container import FORMAT_VERSION, CheckpointFile, CheckpointWriter, Header, Parent
from dynaquant.store.entry import Entry
from dynaquant.store.run import Run
from dynaquant.store.writing import Checkpoint

HASH = "0123456789abcdef" * 4
TRAILER = 40
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


def opened(folder: Path, content: bytes) -> CheckpointFile:
    path = folder / "some.dqc"
    path.write_bytes(content)
    return CheckpointFile(path)


def refused(folder: Path, content: bytes) -> str:
    """Returns the error for a file that cannot be opened. Removes the file name, with which the error must begin."""
    with pytest.raises(CheckpointError) as caught:
        opened(folder, content)
    name, _, said = str(caught.value).partition(": ")
    assert name == str(folder / "some.dqc")
    return said


def broken_entry(folder: Path, name="w", **changes) -> str:
    """Returns the error for a file with a changed entry."""
    said = refused(folder, file_of(header({**entry(name), **changes}), b"\0" * 8))
    assert said.startswith(f"the entry of tensor {name!r} is broken (")
    return said


# Round trips


def test_a_header_survives_a_round_trip(tmp_path):
    labels = (Label("weight", "linear"), Label("first_moment"), Label("exact", "\ud800 naïve"))
    part = Conditional("log_grid", 6, -90, 4, 2, 3, True, 30)
    schemes = {
        Rearranged(16, 3, 5, "rearranged"): 80,
        Reference(): 0,
        Raw(): 12,
        Lossless(needs_parent=True): 7,
        BytePlanes(): 9,
        Conditional("centres", 4, 0, 0, 1, 2, False, 80): 80,
        Conditional("grid", 4, -40, 0, 1, 2, True, 80): 80,
        RankOneFactors(part, part): 60,
        SecondMomentUnits(part, "a.7"): 30,
    }
    entries = tuple(
        Entry(f"a.{i}", labels[i % 3], "bfloat16", (2, 3), HASH, size, scheme)
        for i, (scheme, size) in enumerate(schemes.items())
    )
    streams = [bytes([i]) * size for i, size in enumerate(schemes.values())]
    written = Header(7, 9, Parent(6, HASH), {"dict": [["ä\n\ud800", 1.5]]}, entries, {"notes": ["é"]})
    with (tmp_path / "some.dqc").open("wb") as out:
        writer = CheckpointWriter(out)
        for stream in streams:
            writer.add(stream)
        writer.finish(written)
    file = CheckpointFile(tmp_path / "some.dqc")
    assert file.header == written
    assert file.header.identity == written.identity
    assert [file.read(e) for e in entries] == streams


@given(st.lists(st.text(max_size=40), max_size=6))
def test_every_small_header_survives_a_round_trip(tmp_path_factory, texts):
    path = tmp_path_factory.getbasetemp() / "small.dqc"
    with path.open("wb") as out:
        CheckpointWriter(out).finish(Header(0, 1, None, texts, (), {}))
    assert CheckpointFile(path).header.tree == texts


def test_a_header_that_compresses_to_its_own_size_survives_a_round_trip(tmp_path):
    letters = [chr(code) for code in range(0x23, 0x800) if code != 0x5C]
    draw = random.Random(0)
    for _ in range(50_000):
        written = Header(0, 1, None, "".join(draw.sample(letters, 19)), (), {})
        plain = to_json(header(step=0, tree=written.tree))
        if len(zstandard.ZstdCompressor(level=9).compress(plain)) == len(plain):
            break
    with (tmp_path / "some.dqc").open("wb") as out:
        CheckpointWriter(out).finish(written)
    assert CheckpointFile(tmp_path / "some.dqc").header == written


def test_a_file_written_by_hand_is_read(tmp_path):
    data = struct.pack("<ff", 1.5, -2.5)
    tree = {"dict": [["weights", {"tensor": "w"}]]}
    for compress in (False, True):
        write(tmp_path, header(entry(data=data), tree=tree), data, compress=compress)
        run = Run(tmp_path)
        file = run.file(1)
        state = unflatten(file.header.tree, run.load(file))
        assert list(state) == ["weights"]
        assert torch.equal(state["weights"], torch.tensor([1.5, -2.5]))


# Damage to a whole file


@pytest.fixture(scope="module", params=["conditional", "rearranged"])
def small_run(tmp_path_factory, request) -> Run:
    """A keyframe and a delta with tensors of every scheme, for each coder of levels."""
    torch.manual_seed(0)
    run, base = WritableRun(tmp_path_factory.mktemp("run")), None
    weights, moment, counts = torch.randn(12, 8), torch.rand(6, 4) ** 2, torch.arange(40)
    for step in (1, 2):
        prepared = kmeans_weights({"w": weights}, {"w": Label("weight")}, {})
        quantized = quantize_weights(prepared, Configuration(bins=3, embedding_bins=3, protected=0.05))
        second = quantize_rank_one(moment)
        tensors = {
            "repeats": torch.randn(20, generator=torch.Generator().manual_seed(step)).repeat(4),
            "w": quantized["w"],
            "m": quantize_first_moment(torch.randn(6, 4) * moment.sqrt(), second, "v", 0.9),
            "v": second,
            "counts": counts + step,
            "b": torch.randn(2),
            "same": torch.ones(3),
        }
        tree, _ = flatten(tensors_to_state(tensors))
        labels = {name: Label("exact") for name in tensors}
        _, base = run.commit(Checkpoint(step, tree, tensors, labels, coder=request.param), base)
        weights[0] += 0.5
        moment[0] *= 2
    kinds = {type(e.scheme) for step in (1, 2) for e in run.file(step).header.entries}
    levels = Rearranged if request.param == "rearranged" else Conditional
    assert kinds == {Raw, BytePlanes, Lossless, Reference, RankOneFactors, SecondMomentUnits, levels}
    needy = {type(e.scheme) for e in run.file(2).header.entries if e.needs_parent}
    assert needy >= {Reference, Lossless, levels}
    return run


def tensors_to_state(tensors) -> dict:
    return {name: value for name, value in tensors.items() if isinstance(value, Tensor)}


@pytest.mark.parametrize("step", [1, 2])
def test_a_file_truncated_anywhere_is_an_error(small_run, tmp_path, step):
    whole = small_run.path(step).read_bytes()
    said = {refused(tmp_path, whole[:size]) for size in range(len(whole))}
    assert said == {
        "not a dynaquant checkpoint (or damaged in its first bytes)",
        "truncated: the file ends too early",
        "truncated, or damaged at its end",
    }


def idle_bits(file: CheckpointFile, content: bytes) -> dict[int, int]:
    """Returns the bits of a file that have no meaning, by position.

    A zstd frame has an unused bit. Differences have two bytes about classes, and those here have no classes.
    """
    idle = {match.end(): 0x10 for match in re.finditer(re.escape(ZSTD_MAGIC), content)}
    position = 16
    for e in file.header.entries:
        if isinstance(e.scheme, Lossless) and e.needs_parent:
            idle |= {position + 6: 0xFF, position + 7: 0xFF}
        position += e.size
    return idle


@pytest.mark.parametrize("step", [1, 2])
def test_every_altered_byte_is_detected(small_run, tmp_path, step):
    for other in (1, 2):
        (tmp_path / small_run.path(other).name).write_bytes(small_run.path(other).read_bytes())
    run = Run(tmp_path)
    path, whole = run.path(step), small_run.path(step).read_bytes()
    idle = idle_bits(small_run.file(step), whole)
    for position in range(len(whole)):
        for flip in (1 << position % 8, 0xFF):
            if not flip & ~idle.get(position, 0):
                continue
            path.write_bytes(whole[:position] + bytes([whole[position] ^ flip]) + whole[position + 1 :])
            with pytest.raises(CheckpointError, match=path.name):
                run.load(run.file(step))


def test_appended_bytes_are_detected(small_run, tmp_path):
    assert refused(tmp_path, small_run.path(1).read_bytes() + b"\n") == "truncated, or damaged at its end"


def test_changed_line_endings_are_detected(small_run, tmp_path):
    content = small_run.path(1).read_bytes().replace(b"\r\n", b"\n")
    assert refused(tmp_path, content) == "not a dynaquant checkpoint (or damaged in its first bytes)"


# Faults of preamble and trailer


@pytest.mark.parametrize("content", [b"", b"\x89DQ", b"PK\x03\x04" + b"\0" * 100, b"\0" * 1000])
def test_the_error_for_another_file_says_that_it_is_not_a_checkpoint(tmp_path, content):
    assert refused(tmp_path, content) == "not a dynaquant checkpoint (or damaged in its first bytes)"


def test_the_error_for_a_file_of_torch_save_says_what_reads_it(tmp_path):
    said = "a file of torch.save, not a dynaquant checkpoint: read it with torch.load, or compress it with"
    for path in (tmp_path / "x.pt", tmp_path / f"{'long' * 60}.pt"):
        torch.save({"w": torch.ones(3)}, path)
        with pytest.raises(CheckpointError) as caught:
            dq.load(path)
        assert str(caught.value) == f"{path}: {said} 'dynaquant compress'"
        with path.open("rb") as file, pytest.raises(CheckpointError, match=said):
            dq.load(file)


def test_the_error_for_another_version_names_it(tmp_path):
    for version in (FORMAT_VERSION + 1, 2**64 - 1):
        said = refused(tmp_path, file_of(header(), version=version))
        assert said == f"format version {version}, but this dynaquant reads version 1; install a newer one"


def test_the_error_for_a_file_of_the_future_names_what_is_lacking(tmp_path):
    """What follows in such a header may be anything: it is not read."""
    said = refused(tmp_path, file_of(to_json({"requires": ["segments", "coding new", "coding raw"], "more": 1})))
    assert said == "needs what this dynaquant cannot read: segments, coding new; install a newer one"


@pytest.mark.parametrize("requires", [None, "segments", {}, [1], ["a\n"], [["coding raw"]]])
def test_what_a_file_requires_is_a_list_of_names(tmp_path, requires):
    assert refused(tmp_path, file_of(to_json(header(requires=requires)))).startswith(
        "altered: its header cannot be parsed"
    )


def test_several_parents_are_refused(tmp_path):
    parents = [{"step": 1, "identity": HASH}, {"step": 2, "identity": HASH}]
    assert "it has 2 parents" in refused(tmp_path, file_of(to_json(header(step=3, parents=parents))))


def test_a_folder_in_place_of_a_file_is_an_error(tmp_path):
    (tmp_path / "some.dqc").mkdir()
    with pytest.raises(CheckpointError, match=r"some\.dqc is a folder, not a file"):
        CheckpointFile(tmp_path / "some.dqc")


def trailer(content: bytes, stored: int | None = None, plain: int | None = None) -> bytes:
    """Returns the file with other sizes in its trailer."""
    sizes = struct.unpack("<QQ", content[-TRAILER:][:16])
    changed = struct.pack(
        "<QQ", *(old if new is None else new for old, new in zip(sizes, (stored, plain), strict=True))
    )
    return content[:-TRAILER] + changed + content[-TRAILER + 16 :]


@pytest.mark.parametrize("size", [10**6, 2**63, 2**64 - 1])
def test_a_header_larger_than_the_file_is_refused(tmp_path, size):
    said = refused(tmp_path, trailer(file_of(header()), stored=size))
    assert said == "altered: its header would be larger than the file"


def test_a_wrong_header_position_fails_the_checksum(tmp_path):
    said = refused(tmp_path, trailer(file_of(header(entry()), b"\0" * 8), stored=20))
    assert said == "altered: its header does not have the checksum that was written with it"


def test_a_header_that_claims_to_expand_beyond_the_limit_is_refused(tmp_path):
    said = refused(tmp_path, file_of(header(), plain_size=2**62))
    assert said == "altered: its header claims to expand beyond the limit"


def test_a_header_that_compresses_well_is_padded(tmp_path):
    model = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(3000))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1)
    sizes = {}
    for much in ([0] * 500_000, []):
        path = tmp_path / f"{len(much)}.dqc"
        record = dq.save({"model": model.state_dict(), "seen": much}, path, quality="lossless")
        assert record.total.stored == path.stat().st_size
        loaded = dq.load(path)
        assert (bits(loaded["model"]) == bits(model.state_dict()), loaded["seen"] == much) == (True, True)
        sizes[len(much)] = path.stat().st_size
    assert sizes[500_000] < 200_000 + sizes[0]  # a megabyte of JSON, which may be at most 16 times as large
    assert sizes[0] < 150_000
    again = tmp_path / "again.dqc"
    dq.save({"model": model.state_dict(), "seen": []}, again, quality="lossless")
    assert again.stat().st_size == pytest.approx(sizes[0], rel=0.1)


def test_a_header_bomb_is_not_expanded(tmp_path):
    said = refused(tmp_path, file_of(b" " * 10**8, compress=True))
    assert said == "altered: its header claims to expand beyond the limit"


def test_a_compressed_header_of_another_size_is_refused(tmp_path):
    content = file_of(header(), compress=True)
    assert (
        refused(tmp_path, trailer(content, plain=1000)) == "altered: its header does not have the size that it claims"
    )
    said = refused(tmp_path, file_of(header(), plain_size=1000))
    assert said.startswith("altered: its header cannot be decompressed (")


@pytest.mark.parametrize("streams", [b"", b"\0" * 7, b"\0" * 9])
def test_streams_that_do_not_fill_the_file_are_refused(tmp_path, streams):
    said = refused(tmp_path, file_of(header(entry()), streams))
    assert said == "the sizes of its streams do not add up to the size of the file"


# Faults of the header


@pytest.mark.parametrize(
    "plain",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"1",
        b'"\xff"',
        b"{} {}",
        to_json(header())[:-1],
        to_json({k: v for k, v in header().items() if k != "tree"}),
        to_json(header(record=1)),
        to_json(header(tensors=1)),
        to_json(header(parent=[1, HASH])),
        to_json(header(parent={"step": 1})),
        to_json(header(step=7)).replace(b"7", b"7" * 5000),
    ],
    ids=lambda plain: plain[:12],
)
def test_a_header_without_its_fields_is_refused(tmp_path, plain):
    assert refused(tmp_path, file_of(plain)).startswith("altered: its header cannot be parsed (")


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_nan_and_infinities_in_a_header_are_refused(tmp_path, constant):
    said = refused(tmp_path, file_of(to_json(header(tree="§")).replace(b'"\xc2\xa7"', constant.encode())))
    assert f"{constant} is not JSON" in said


def test_a_deeply_nested_header_is_refused(tmp_path):
    for depth in [*range(850, 1000), 10_000, 1_000_000]:
        tree = b"[" * depth + b"]" * depth
        assert "altered" in refused(tmp_path, file_of(to_json(header(tree="§")).replace(b'"\xc2\xa7"', tree)))


@pytest.mark.parametrize("key", ["step", "sequence"])
@pytest.mark.parametrize("value", [-1, True, 1.0, "1", None, [1]])
def test_steps_are_integers_from_zero_on(tmp_path, key, value):
    said = refused(tmp_path, file_of(header(**{key: value})))
    assert said == "altered: its step, sequence number or parent has the wrong type or is out of range"


@pytest.mark.parametrize(
    "parent", [{"step": -1, "identity": HASH}, {"step": True, "identity": HASH}, {"step": 1, "identity": 5}]
)
def test_a_parent_is_a_step_and_an_identity(tmp_path, parent):
    said = refused(tmp_path, file_of(header(parent=parent)))
    assert said == "altered: its step, sequence number or parent has the wrong type or is out of range"


@pytest.mark.parametrize("parent", [0, "", [], {}, False])
def test_only_null_stands_for_no_parent(tmp_path, parent):
    reference = entry(data=b"", shape=[2], coding={"kind": "reference"})
    assert "altered" in refused(tmp_path, file_of(header(reference, parent=parent)))


def test_a_step_too_long_for_a_file_name_is_an_error(tmp_path):
    far = {"step": 10**300, "identity": HASH}
    reference = entry(data=b"", coding={"kind": "reference"})
    write(tmp_path, header(reference, parent=far), b"")
    run = Run(tmp_path)
    with pytest.raises(CheckpointError):
        run.load(run.file(1))


def test_an_identity_that_does_not_match_the_contents_is_refused(tmp_path):
    said = refused(tmp_path, file_of(header(identity=HASH)))
    assert said == "altered: its identity is not the hash of its contents"


def test_tensor_names_are_unique(tmp_path):
    assert refused(tmp_path, file_of(header(entry(), entry()), b"\0" * 16)) == "altered: a tensor occurs twice"


@pytest.mark.parametrize("arrangement", ["delta", "rearranged", None])
def test_a_keyframe_has_no_tensor_that_needs_a_parent(tmp_path, arrangement):
    reference = entry(data=b"", coding={"kind": "reference"})
    needy = quantized(b"\0" * 8, 8, arrangement) if arrangement else reference
    said = refused(tmp_path, file_of(header(needy), b"\0" * needy["size"]))
    assert said == "altered: a tensor needs a parent, but the checkpoint has none"


# Faults of an entry


@pytest.mark.parametrize("entries", [[None], [[]], ["w"], [1]])
def test_entries_are_objects(tmp_path, entries):
    assert "it is not an object" in refused(tmp_path, file_of(header(tensors=entries)))


@pytest.mark.parametrize("key", ["name", "role", "layer_type", "dtype", "shape", "hash", "size", "coding"])
def test_every_field_of_an_entry_is_present_and_has_the_right_type(tmp_path, key):
    lacking = {k: v for k, v in entry().items() if k != key}
    said = refused(tmp_path, file_of(header(lacking, identity=HASH), b"\0" * 8))
    assert "is broken (" in said
    assert key in said
    for value in (None, True, 1.5, {"kind": 1}, [[]]):
        said = refused(tmp_path, file_of(header({**entry(), key: value}, identity=HASH), b"\0" * 8))
        assert "is broken (" in said


@pytest.mark.parametrize("shape", [[-1], [True], [2.0], ["2"], [None], [2**62], [[2]]])
def test_shapes_are_lists_of_non_negative_integers(tmp_path, shape):
    assert "shape is" in broken_entry(tmp_path, shape=shape)


def test_sizes_are_not_negative(tmp_path):
    assert "its size is -8" in broken_entry(tmp_path, size=-8)


def test_a_negative_size_cannot_balance_a_large_one(tmp_path):
    negative, large = {**entry("a"), "size": -8}, {**entry("b"), "size": 16}
    assert "its size is -8" in refused(tmp_path, file_of(header(negative, large), b"\0" * 8))


def test_unknown_types_are_refused(tmp_path):
    assert "float31" in broken_entry(tmp_path, dtype="float31")
    assert "its role is 'bystander'" in broken_entry(tmp_path, role="bystander")
    assert "pickle" in broken_entry(tmp_path, coding={"kind": "pickle"})
    assert "surprise" in broken_entry(tmp_path, coding={"kind": "raw", "surprise": 1})
    assert "its hash is 'xyz'" in broken_entry(tmp_path, hash="xyz")
    assert "its hash is" in broken_entry(tmp_path, hash=HASH.upper())


def test_a_reference_has_no_stream(tmp_path):
    assert "its size is 8" in broken_entry(tmp_path, coding={"kind": "reference"})


def test_a_raw_stream_has_the_size_of_the_tensor(tmp_path):
    assert "its stream and its values differ in size" in broken_entry(tmp_path, shape=[3])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"bins": 255}, "its scheme is not valid"),
        ({"bins": -1}, "its scheme is not valid"),
        ({"bins": True}, "bins is True"),
        ({"arrangement": "sideways"}, "its scheme is not valid"),
        ({"protected": 9}, "more protected values than elements"),
        ({"protected": -1}, "more protected values than elements"),
        ({"protected_size": 9}, "do not fit its stream"),
        ({"protected_size": -1}, "do not fit its stream"),
        ({"bins": 3}, "do not fit its stream"),
        ({"dtype": "int32"}, "int32 cannot be quantized"),
    ],
)
def test_the_counts_of_a_quantized_tensor_match_its_stream(tmp_path, change, said):
    content = file_of(header(quantized(b"\0" * 8, 8, **change)), b"\0" * 8)
    assert said in refused(tmp_path, content)


# Small files that claim large tensors

HUGE = 10**12


def hostile_files(folder: Path) -> dict[str, int]:
    """Writes files that can be opened, but claim far larger tensors than their size allows. Returns their steps."""
    claim = MAX_EXPANSION * 100_000
    garbage = b"\x07" * 100_000
    frame = bytes.fromhex("28b52ffde0") + (claim // 4).to_bytes(8, "little") + b"\x01\x00\x00"
    planes = ((struct.pack("<Q", len(frame)) + frame) * 4).ljust(100_000, b"\0")
    cases = {
        "byte planes": (entry(data=garbage, shape=[claim // 4], coding={"kind": "planes"}), garbage),
        "byte planes that claim it too": (entry(data=planes, shape=[claim // 4], coding={"kind": "planes"}), planes),
        "levels": (quantized(garbage, claim // 4), garbage),
        "protected": (quantized(garbage, claim // 4, protected=claim // 4, protected_size=100_000), garbage),
        "delta": (quantized(garbage, HUGE, "delta", bins=2), garbage),
        "rearranged": (quantized(garbage, HUGE, "rearranged", bins=2), garbage),
        "reference": (entry(data=b"", shape=[HUGE], coding={"kind": "reference"}), b""),
        "dimensions": (entry(data=b"", shape=[1] * 100_000 + [0]), b""),
        "empty": (entry(data=b"", shape=[0, 2**61, 2**61]), b""),
    }
    parent = header(entry(), step=0)
    write(folder, parent, b"\0" * 8)
    parent_of = {"step": 0, "identity": parent["identity"]}
    steps = {name: step for step, name in enumerate(cases, start=1)}
    for name, (tensor, streams) in cases.items():
        needs_parent = name in ("delta", "rearranged", "reference")
        plain = header(tensor, step=steps[name], sequence=2, parent=parent_of if needs_parent else None)
        write(folder, plain, streams)
    return steps


LOADER = """
import resource, sys
import torch
from dynaquant.store.run import Run
run = Run(sys.argv[1])
run.load(run.file(0))
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + 2**30
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for step in map(int, sys.argv[2:]):
    try:
        run.load(run.file(step))
        print("read")
    except BaseException as error:
        print(type(error).__name__, str(error)[:200].replace("\\n", " "))
"""


@pytest.fixture(scope="module")
def said_of_hostile_files(tmp_path_factory) -> dict[str, str]:
    """The outcome for each hostile file in a process that may use one more GiB of memory."""
    folder = tmp_path_factory.mktemp("hostile")
    steps = hostile_files(folder)
    command = [sys.executable, "-c", LOADER, str(folder), *map(str, steps.values())]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return dict(zip(steps, done.stdout.splitlines(), strict=True))


BOMBS = ("byte planes", "byte planes that claim it too", "levels", "protected", "delta", "rearranged", "reference")


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_cannot_ask_for_much_memory(said_of_hostile_files, name):
    assert said_of_hostile_files[name].startswith("CheckpointError ")


@pytest.mark.parametrize("name", ["dimensions", "empty"])
def test_a_huge_shape_without_elements_is_harmless(said_of_hostile_files, name):
    assert said_of_hostile_files[name].startswith(("CheckpointError ", "read"))


@pytest.mark.parametrize("kind", ["planes", "alone"])
def test_a_shape_beyond_what_the_stream_can_hold_is_refused_on_opening(tmp_path, kind):
    planes = entry(data=b"\0" * 8, shape=[HUGE], coding={"kind": "planes"})
    hostile = planes if kind == "planes" else quantized(b"\0" * 8, HUGE)
    said = refused(tmp_path, file_of(header(hostile), b"\0" * 8))
    assert "its stream is too small for its shape" in said


def test_a_shape_whose_size_overflows_is_refused(tmp_path):
    needs_no_stream = entry(data=b"", shape=[2**40, 2**40], coding={"kind": "reference"})
    assert "larger than any tensor" in refused(tmp_path, file_of(header(needs_no_stream)))


# Streams that do not match the header


def load_error(folder: Path, *tensors: dict, streams: bytes, tree=None) -> str:
    write(folder, header(*tensors, tree=tree), streams)
    run = Run(folder)
    with pytest.raises(CheckpointError) as caught:
        run.load(run.file(1))
    return str(caught.value)


def test_values_that_do_not_match_their_hash_are_refused(tmp_path):
    said = load_error(tmp_path, entry(hash=HASH), streams=b"\0" * 8)
    assert said.endswith("step-000000000001.dqc: tensor w does not decode to the values that were stored")


def test_a_bool_other_than_zero_or_one_is_refused(tmp_path):
    said = load_error(tmp_path, entry(data=b"\x02", dtype="bool", shape=[1]), streams=b"\x02")
    assert said.endswith("tensor w is damaged (a bool is neither 0 nor 1)")


@pytest.mark.parametrize("name", sorted(ITEM_SIZES.keys() - DTYPES))
def test_a_dtype_that_this_pytorch_lacks_is_shown_and_named_when_it_is_decoded(tmp_path, name):
    write(tmp_path, header(entry("w", b"\0" * ITEM_SIZES[name], name, [1])), b"\0" * ITEM_SIZES[name])
    run = Run(tmp_path)
    assert [(info.dtype, info.size.raw) for info in tensors_of(run.file(1))] == [(name, ITEM_SIZES[name])]
    with pytest.raises(CheckpointError, match=f"has no element type {name}; install a newer one"):
        run.load(run.file(1))


def test_byte_planes_that_do_not_fit_are_refused(tmp_path):
    def plane(data: bytes, **options) -> bytes:
        frame = zstandard.ZstdCompressor(**options).compress(data)
        return struct.pack("<Q", len(frame)) + frame

    good = plane(b"abc")
    cases = {
        good: "end too early",
        good + b"\xff" * 8: "end too early",
        good + plane(b"abcd"): "another number of bytes",
        good + plane(b"abc", write_content_size=False): "another number of bytes",
        good + struct.pack("<Q", 4) + b"zstd": "cannot be decompressed",
        good * 2 + b"\0": "extra bytes after the byte planes",
    }
    for stream, said in cases.items():
        tensor = entry(data=stream, dtype="int16", shape=[3], coding={"kind": "planes"})
        assert said in load_error(tmp_path, tensor, streams=stream)


def test_damaged_levels_are_refused(small_run, tmp_path):
    file = small_run.file(1)
    levels = file.header.by_name["w"]
    stream = file.read(levels)
    good = levels.to_json()
    assert "tensor w is damaged (" in load_error(tmp_path, {**good, "shape": [12, 9]}, streams=stream)
    fewer_bins = {**good, "coding": {**good["coding"], "bins": 2}}
    assert "tensor w is damaged (" in load_error(tmp_path, fewer_bins, streams=stream)
    fewer_protected = {**good, "coding": {**good["coding"], "protected": 1}}
    assert "tensor w is damaged (" in load_error(tmp_path, fewer_protected, streams=stream)


@given(st.binary(max_size=60), st.integers(0, 64), st.integers(0, 4), st.integers(0, 4), st.integers(0, 20))
def test_random_levels_are_harmless(tmp_path_factory, stream, elements, bins, protected, protected_size):
    tensor = quantized(stream, elements, "alone", bins, protected, protected_size)
    folder = tmp_path_factory.getbasetemp() / "random"
    write(folder, header(tensor), stream)
    run = Run(folder)
    with pytest.raises(CheckpointError):
        run.load(run.file(1))


@given(st.data())
def test_a_header_with_any_altered_value_is_an_error_or_harmless(small_run, tmp_path_factory, data):
    """With right checksums, any header gives a CheckpointError or tensors with the hashes in it."""
    file = small_run.file(1)
    tensors = [dict(e.to_json()) for e in file.header.entries]
    target = data.draw(st.sampled_from(tensors))
    places = [target, target["coding"], *(part for part in target["coding"].values() if isinstance(part, dict))]
    place = data.draw(st.sampled_from(places))
    key = data.draw(st.sampled_from(sorted(place)))
    leaf = st.one_of(st.none(), st.booleans(), st.integers(-5, 2**70), st.text(max_size=8), st.floats(allow_nan=False))
    place[key] = data.draw(st.one_of(leaf, st.lists(leaf, max_size=3), st.just([0]), st.sampled_from([8, 12, 96])))
    folder = tmp_path_factory.getbasetemp() / "altered"
    names = [t["name"] for t in tensors]
    hashes = [t["hash"] for t in tensors]
    identity = {} if all(isinstance(x, str) for x in names + hashes) else {"identity": HASH}
    streams = b"".join(file.read(e) for e in file.header.entries)
    path = write(folder, header(*tensors, **identity), streams)
    run = Run(folder)
    try:
        loaded = run.load(CheckpointFile(path))
    except CheckpointError:
        return
    assert set(loaded) == set(names)


def test_the_magic_number_reveals_changed_line_endings():
    assert b"\r\n" in MAGIC
    assert MAGIC[0] > 0x7F


def test_an_identity_depends_on_the_contents_alone():
    one = Header(1, 1, None, ["tree"], (), {})
    assert replace(one, step=2, sequence=5, parent=Parent(1, HASH), record={"notes": ["x"]}).identity == one.identity
    assert replace(one, tree=["other"]).identity != one.identity
