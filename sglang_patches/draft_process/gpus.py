"""The GPUs that this process sees, and what of their memory is in use."""

from __future__ import annotations


class Gpus:
    def count(self) -> int:
        """0 without one, where a server on a GPU is only resolved."""
        import torch  # late: its threads get the cores that the draft process has then

        return torch.cuda.device_count()

    def bytes_in_use(self, index: int) -> int:
        """Bytes of the GPU's memory that all processes of the host use, as `nvidia-smi` has it. Raises what torch and NVML raise where
        that cannot be told."""
        import torch

        return torch.cuda.device_memory_used(index)
