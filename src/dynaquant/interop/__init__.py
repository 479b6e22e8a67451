"""Files of other programs: safetensors, ``torch.save``, DCP (``torch.distributed.checkpoint``), folders of trainers.

- ``whole_state.py``: a state that was read or handed over, whatever its format
- ``any_format.py``: detects the format of a file or folder and reads it
- ``safetensors.py``: reads and writes safetensors, single files and shards with an index
- ``torchfile.py``: reads and writes files of ``torch.save``
- ``dcp_folder.py``: reads and writes folders of DCP
- ``dcp_writer.py``, ``dcp_reader.py``: storages with which DCP saves to runs and loads from them
- ``dcp.py``: the names of these storages
- ``folder.py``: reads a trainer's folder: weights, optimizer states, other files
- ``inferred_roles.py``: infers roles and gradients of tensors from their names and places
- ``state_source.py``: such a state, or what DCP saves, as a source of a checkpoint; a state as the subject of a metric
- ``packing.py``: compresses files into checkpoints
- ``state_file.py``: saves a state of this process to one file
- ``targets.py``: the formats that a checkpoint is exported to
- ``weights.py``: writes a model's state dict as safetensors
- ``frameworks.py``: writes what a framework's own trainer resumes from
- ``export.py``: writes a checkpoint as a file or folder of another program
"""
