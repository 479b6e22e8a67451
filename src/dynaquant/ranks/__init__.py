"""The ranks of a training: who holds what, and how they agree.

- ``group.py``: the processes of a training: exchange values, fail together, notice communication in ``evaluate``
- ``board.py``: what each rank does, for the message of a rank that waits in vain
- ``lockstep.py``: steps that ranks take together
- ``dtensors.py``: what this rank holds of a sharded tensor
"""
