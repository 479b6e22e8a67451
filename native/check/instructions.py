"""Counts the instructions that an ARM processor executes to code a level, in an emulator.

``make arm-instructions`` runs it: ``python native/check/instructions.py PROGRAM``. PROGRAM is ``levels.cpp`` for ARM.
The emulator logs each instruction of the coder. What one turn more makes counts, so nothing that comes before does.
"""

import os
import re
import subprocess
import sys

LEVELS = 8_000
"""Those of a block of the program."""
CASES = {
    "keyframe": ("2", "1"),
    "0.05 % changed": ("2", "0.0005"),
    "5 % changed": ("2", "0.05"),
    "30 % changed": ("2", "0.3"),
    "5 % changed, few levels": ("0.7", "0.05"),
    "5 % changed, 200 levels": ("30", "0.05"),
}
"""The standard deviation of the weights in grid steps, and the share of their levels that changes."""
ONE_AT_A_TIME = {"QEMU_SINGLESTEP": "1", "QEMU_ONE_INSN_PER_TB": "1"}
"""The same option in older and newer versions of QEMU."""


def coder_of(program: str) -> str:
    """Return the addresses of the coder, as QEMU wants them."""
    listed = subprocess.run(["aarch64-linux-gnu-nm", "-S", program], capture_output=True, text=True, check=True).stdout
    coder = re.findall(r"^(\w+) (\w+) [tT] .*level_rans.*\d(?:en|de)code", listed, re.MULTILINE)
    ranges = [(int(at, 16), int(at, 16) + int(size, 16)) for at, size in coder]
    return f"{min(begin for begin, _ in ranges):#x}..{max(end for _, end in ranges):#x}"


def executed(program: str, coder: str, *arguments: str) -> int:
    """Return how many instructions of the coder the program executes."""
    command = ["qemu-aarch64", "-d", "exec,nochain", "-dfilter", coder, program, *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, **ONE_AT_A_TIME}) as emulator:
        assert emulator.stderr
        count = sum(line.startswith(b"Trace") for line in emulator.stderr)
    if emulator.returncode != 0:
        sys.exit(f"{program} {' '.join(arguments)} ended with status {emulator.returncode}")
    return count


def main(program: str) -> None:
    """Print a line for each case."""
    coder = coder_of(program)
    print("instructions per level   encode: plain, NEON   decode: plain, NEON")
    for case, weights in CASES.items():
        neither, encoded, decoded = (
            [executed(program, coder, *weights, instructions, *turns) for instructions in "01"]
            for turns in ("00", "10", "01")
        )
        more, less = [*encoded, *decoded], [*neither, *neither]
        cells = [(count - before) / LEVELS for count, before in zip(more, less, strict=True)]
        print("{:24} {:10.1f} {:10.1f} {:10.1f} {:10.1f}".format(case, *cells))


if __name__ == "__main__":
    main(sys.argv[1])
