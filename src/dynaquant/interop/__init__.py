"""Files of other programs: safetensors, torch.save, DCP, folders of Transformers and Accelerate."""
