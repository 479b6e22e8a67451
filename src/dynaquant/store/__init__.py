"""Checkpoint files and runs: writing, reading, atomic commits, locks, retention.

The files, in reading order:

- ``files.py``: checks, opens, reads and syncs files and folders
- ``threads.py``: work on other threads: results in order, writes behind
- ``locks.py``: locks that the system drops when a process dies; one writer per run
- ``atomic_files.py``: writes a file or folder atomically; deletes the temporary files of killed processes
- ``entry.py``: what a header says about one tensor, and what a reader must know to read it
- ``layout.py``: the parts of a checkpoint, and where the boxes of its tensors are
- ``container.py``: one checkpoint file
- ``chain.py``: opens all files of a checkpoint (parents, parts, frozen parameters), and retries if the writer changes
  the run meanwhile
- ``decoding.py``: decodes one entry of a file, and explains its errors
- ``frozen_tensors.py``: checks and copies the files of frozen parameters
- ``reading.py``: decodes tensors, or boxes of them, from a file, its parts and its parents
- ``writing.py``: encodes a checkpoint, or a part of one, to a file, and verifies the file
- ``single_file.py``: writes a checkpoint file outside of runs
- ``catalogue.py``: what a listing says of each checkpoint, in one file
- ``run.py``: ``Run`` lists, opens and decodes the checkpoints in a folder, and their lossless copies
- ``tags.py``: names for checkpoints
- ``unneeded.py``: finds files that no checkpoint needs any more
- ``commit.py``: ``WritableRun`` commits checkpoints atomically, re-codes and deletes them
- ``pointers.py``: files outside of a run that stand for its checkpoints
- ``verifying.py``: finds damage in a checkpoint or a run
- ``retention.py``: decides which checkpoints to keep; deletes the others
- ``recoding.py``: re-codes a run in chains of another length; starts a new run from a checkpoint of another one
"""
