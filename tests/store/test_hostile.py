"""Hostile files and folders: every reader ends in time with a one-line error, without a traceback."""

import json
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from crafted import MAGIC, entry, file_of, hash_of, header, quantized, write

SUPPORT = Path(__file__).parents[1] / "support"

TREE = {"dict": [["model", {"dict": [["w", {"tensor": "w"}]]}]]}
DATA = b"\0\0\x80?" * 2


def sound(run: Path, **other) -> dict:
    """Writes a sound checkpoint of step 1."""
    plain = header(entry("w", DATA), tree=TREE, **other)
    write(run, plain, DATA)
    return plain


def child_of(parent: dict, step: int, **other) -> dict:
    """Returns the header of a checkpoint that refers to its parent's tensor."""
    same = entry("w", DATA, size=0, coding={"kind": "reference"})
    of = {"step": parent["step"], "identity": parent["identity"]}
    return header(same, tree=TREE, step=step, sequence=step, parent=of, **other)


def deep(depth: int):
    node = 1
    for _ in range(depth):
        node = {"tuple": [node]}
    return node


def levels_of_zeros(blocks: int) -> bytes:
    """Returns coded levels, all 0, of this many blocks of 131,072."""
    block = b"\0\0\1\0" * 4
    return struct.pack("<I", len(block)) * blocks + b"\0" * 4 + bytes.fromhex("00000100") * 4 * blocks


def claiming(run: Path, dtype: str, data: bytes, elements: int, scheme: dict) -> None:
    claim = entry("w", data, dtype, [elements], role="weight", coding=scheme, hash="0" * 64)
    write(run, header(claim, tree=TREE), data)


ZEROS = levels_of_zeros(49_999)
CONDITIONAL = {"kind": "conditional", "codebook": "grid", "bins": 0, "first": 0, "pace": 0, "protected": 0}
CONDITIONAL |= {"protected_size": 0, "needs_parent": False, "size": len(ZEROS)}


def second(name: str):
    """Puts something other than a file in place of the checkpoint of step 2, beside a sound one."""

    def make(run: Path) -> None:
        sound(run)
        make_something(run / "step-000000000002.dqc", name)

    return make


def only(name: str):
    def make(run: Path) -> None:
        run.mkdir()
        make_something(run / "step-000000000001.dqc", name)

    return make


def exact(name: str):
    def make(run: Path) -> None:
        sound(run)
        make_something(run / "exact-000000000001.dqc", name)

    return make


def tag(name: str):
    def make(run: Path) -> None:
        sound(run)
        (run / "tags").mkdir()
        make_something(run / "tags" / "hostile", name)

    return make


def make_something(path: Path, name: str) -> None:
    if name == "fifo":
        os.mkfifo(path)
    elif name == "folder":
        path.mkdir()
    elif name == "socket":
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's path must be short
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
        os.chdir(here)
    elif name == "sparse":  # a trailer that claims a header of a terabyte
        with path.open("wb") as file:
            file.write(struct.pack("<8sQ", MAGIC, 2))
            file.truncate(10**12)
            file.seek(10**12 - 40)
            file.write(struct.pack("<QQ16s8s", 10**12 - 56, 10**12 - 56, b"\0" * 16, MAGIC))
    else:
        targets = {"endless": "/dev/zero", "terminal": "/dev/tty", "loop": path, "nothing": path.with_name("not-there")}
        path.symlink_to(targets[name])


SOMETHING = ("fifo", "folder", "socket", "sparse", "endless", "loop", "nothing")


def chain(run: Path) -> None:
    """Writes 200 checkpoints, each a delta of the previous one."""
    plain = sound(run)
    for step in range(2, 201):
        plain = child_of(plain, step)
        write(run, plain)


def broken_chain(run: Path) -> None:
    chain(run)
    (run / "step-000000000003.dqc").unlink()


def itself(run: Path) -> None:
    plain = sound(run)
    write(run, child_of(child_of(plain, 2), 2))


def content(**other):
    def make(run: Path) -> None:
        sound(run)
        plain = header(entry("w", DATA), **{"tree": TREE, "step": 2, "sequence": 2} | other)
        write(run, plain, DATA)

    return make


def alone(plain: dict, data: bytes = b""):

    def make(run: Path) -> None:
        write(run, plain, data)

    return make


def text(plain: str):
    """Writes a file whose header is this text, with the right checksum."""

    def make(run: Path) -> None:
        run.mkdir()
        (run / "step-000000000001.dqc").write_bytes(file_of(plain.encode()))

    return make


def named(name: str):
    def make(run: Path) -> None:
        sound(run)
        tree = {"dict": [["model", {"dict": [[name, {"tensor": name}]]}]]}
        other = b"\1\0\0\0" * 2
        write(run, header(entry(name, other), tree=tree, step=2, sequence=2), other)

    return make


DTYPES = ("float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e8m0fnu", "float4_e2m1fn_x2", "complex32")
DTYPES += ("complex64", "complex128", "bool", "uint8", "int8", "uint16", "uint32", "uint64", "int64")


def every_dtype(run: Path) -> None:
    """Writes two checkpoints with tensors of every kind, in which all values differ."""
    for step in (1, 2):
        data = bytes([step % 2, 0]) * 32
        entries = [
            entry(name, data, name, [64 // size_of(name)], hash=hash_of(name, [64 // size_of(name)], data))
            for name in DTYPES
        ]
        tree = {"dict": [["model", {"dict": [[name, {"tensor": name}] for name in DTYPES]}]]}
        write(run, header(*entries, tree=tree, step=step, sequence=step), data * len(DTYPES))


def size_of(dtype: str) -> int:
    digits = "".join(c if c.isdigit() else " " for c in dtype).split()
    return max(int(digits[0]) // 8, 1) if digits else 1


def file_as_run(data: bytes):
    return lambda run: run.write_bytes(data)


BIG = 10**5  # a reader whose time grows with the square takes too long
CASES = {
    **{f"a checkpoint that is a {name}": only(name) for name in SOMETHING},
    **{f"beside a sound one a {name}": second(name) for name in SOMETHING},
    **{f"an exact copy that is a {name}": exact(name) for name in SOMETHING},
    **{f"a tag that is a {name}": tag(name) for name in SOMETHING},
    **{f"a run that is a {name}": lambda run, name=name: make_something(run, name) for name in SOMETHING},
    "no run": lambda _run: None,
    "an empty folder": lambda run: run.mkdir(),
    "an empty file": file_as_run(b""),
    "a file of nothing but the magic": file_as_run(MAGIC),
    "a file of noise": file_as_run(bytes(range(256)) * 40),
    "a chain of 200": chain,
    "a chain of 200 that is broken": broken_chain,
    "a checkpoint of its own": itself,
    "exact values of 26 GB": lambda run: claiming(
        run, "float32", b"\0" * 10**6, 26 * 10**9 // 4, {"kind": "exact", "needs_parent": False}
    ),
    "zeros of 26 GB": lambda run: claiming(run, "float32", ZEROS, 49_999 * 131_072, CONDITIONAL),
    "zeros of 13 GB": lambda run: claiming(run, "bfloat16", ZEROS, 49_999 * 131_072, CONDITIONAL),
    "levels that are none": alone(header(quantized(b"\7" * 99, 500), tree=TREE), b"\7" * 99),
    "a header nested deeply": text('{"tuple":[' * 90_000),
    "a tree nested deeply": content(tree=deep(300)),
    "a header of 100,000 numbers": content(tree=list(range(BIG))),
    "a shape of 100,000 dimensions": alone(header(entry("w", b"", shape=[0] * BIG, hash="0" * 64), tree=TREE)),
    "a shape that is none": alone(header(entry("w", b"", shape=["x" * BIG], hash="0" * 64), tree=TREE)),
    "a dtype that is none": alone(header(entry("w", b"", "x" * BIG, hash="0" * 64), tree=TREE)),
    "a step of 400 digits": text(json.dumps(header(step=int("9" * 400)))),
    "a step of 5,000 digits": text('{"step":' + "9" * 5000 + "}"),
    "a record of nonsense": content(record={"quality": 5, "search": [], "notes": 7, "seconds": "long"}),
    "a record of large numbers": content(record={"seconds": {"write": 10**400}, "interval": 10**400}),
    "a record of infinities": content(
        record={"quality": {"original": "inf", "restored": "-inf", "degradation": "nan"}, "search": {"limit": "inf"}}
    ),
    "a record of many notes": content(record={"notes": ["n" * BIG, *["n"] * 1000]}),
    "notes that move the cursor": content(record={"notes": ["\x1b[2J\x1b]0;title\x07"]}),
    "a name with escapes": named("w\x1b[2J\r\n\x07"),
    "a name of 100,000 letters": named("w" * BIG),
    "a name that leads elsewhere": named("../../../w"),
    "a name that is no text": named("\ud800"),
    "a name of nothing": named(""),
    "tensors of every dtype": every_dtype,
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("hostile")
    for number, make in enumerate(CASES.values()):
        case = folder / f"{number:03d}"
        case.mkdir()
        make(case / "run")
    script = SUPPORT / "hostile.py"
    done = subprocess.run([sys.executable, script, folder], check=False, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return dict(zip(CASES, (found[number] for number in sorted(found)), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_reader_of_a_hostile_file_ends_with_a_one_line_error(outcomes, case):
    for reader, outcome in outcomes[case].items():
        assert outcome["trace"] is None, (reader, outcome["trace"][-3000:])
        assert outcome["code"] in (0, 1), (reader, outcome)
        if outcome["code"] == 1 and reader != "verify":
            assert outcome["err"].startswith("dynaquant: "), reader
            assert len(outcome["err"]) < 3000, (reader, len(outcome["err"]))
        if reader == "verify" and outcome["code"] == 1:
            said = "damaged: " in outcome["out"] or "not checked, as " in outcome["out"]
            assert said or outcome["err"].startswith("dynaquant: "), outcome


@pytest.mark.slow
def test_an_error_for_too_little_memory_names_the_tensor(outcomes):
    for case, claimed in (("exact values of 26 GB", "26.00 GB"), ("zeros of 26 GB", "26.21 GB")):
        for reader in ("load", "verify", "export"):
            said = outcomes[case][reader]
            text = f"not enough memory to decode tensor w: the file claims {claimed}"
            assert text in said["err"] + said["out"], (case, reader, said)


@pytest.mark.slow
def test_sound_checkpoints_beside_a_hostile_file_are_read(outcomes):
    for name in SOMETHING:
        assert outcomes[f"beside a sound one a {name}"]["load"]["code"] == 0
        assert outcomes[f"beside a sound one a {name}"]["log"]["code"] == 0
        assert outcomes[f"a tag that is a {name}"]["load"]["code"] == 0
        assert "there is no tag 'hostile'" in outcomes[f"a tag that is a {name}"]["load tag"]["err"]
