"""SGLang's CUDA source of the greedy walk, compiled for this machine: the CUDA words are stubbed, a thread is a call."""

from __future__ import annotations

import ctypes
import subprocess
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from tests.support.system import require

SOURCE = r"""
#define __global__
struct { unsigned x, y, z; } blockIdx, threadIdx;
#include "eagle.cuh"
#include "ngram.cuh"
using namespace sglang::speculative;

extern "C" void verify_tree_greedy(
    int32_t* predicts, int32_t* accept_index, int32_t* accept_token_num, int64_t* candidates, int64_t* retrieve_index,
    int64_t* next_token, int64_t* next_sibling, int64_t* target_predict, uint32_t batch, uint32_t steps, uint32_t width) {
  for (blockIdx.x = 0; blockIdx.x < batch; ++blockIdx.x)
    VerifyTreeGreedy<int32_t, int64_t>(predicts, accept_index, accept_token_num, candidates, retrieve_index, next_token,
                                       next_sibling, target_predict, batch, steps, width);
}

extern "C" void reconstruct(
    bool* mask, int64_t* seq_lens, int64_t* positions, int64_t* retrieve_index, int64_t* next_token,
    int64_t* next_sibling, int batch, int width) {
  for (blockIdx.x = 0; blockIdx.x < (unsigned)batch; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < (unsigned)width; ++threadIdx.x)
      reconstructIndicesFromTreeMask(mask, seq_lens, positions, retrieve_index, next_token, next_sibling, batch, width);
}
"""


def _pointer(tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> ctypes.c_void_p:
    """What tree.cuh's TensorMatcher asks of an argument."""
    assert tensor.dtype == dtype and tuple(tensor.shape) == shape and tensor.is_contiguous()
    return ctypes.c_void_p(tensor.data_ptr())


class CudaSource:
    def __init__(self, folder: Path):
        require("g++")
        headers = Path(find_spec("sglang").origin).parent / "kernels/jit/include/sgl_kernel/speculative"
        library = folder / "tree.so"
        (folder / "tree.cpp").write_text(SOURCE)
        subprocess.run(
            ["g++", "-shared", "-fPIC", "-O1", f"-I{headers}", "-o", library, folder / "tree.cpp"],
            check=True,
        )
        self._library = ctypes.CDLL(str(library))

    def verify_tree_greedy(
        self,
        *,
        predicts,
        accept_index,
        accept_token_num,
        candidates,
        retrive_index,
        retrive_next_token,
        retrive_next_sibling,
        target_predict,
    ) -> None:
        """`sglang.kernels.ops.speculative.tree.verify_tree_greedy`, on CPU tensors."""
        batch, width = candidates.shape
        steps = accept_index.shape[1]
        trees = (candidates, retrive_index, retrive_next_token, retrive_next_sibling, target_predict)
        self._library.verify_tree_greedy(
            _pointer(predicts, torch.int32, (batch * width,)),
            _pointer(accept_index, torch.int32, (batch, steps)),
            _pointer(accept_token_num, torch.int32, (batch,)),
            *(_pointer(tensor, torch.int64, (batch, width)) for tensor in trees),
            *(ctypes.c_uint32(n) for n in (batch, steps, width)),
        )

    def reconstruct(self, mask: np.ndarray, seq_lens: np.ndarray) -> tuple[np.ndarray, ...]:
        """(positions, first children, next siblings), each [batch, width], as SGLang reads them off a tree mask."""
        batch, width, _ = mask.shape
        positions, index, next_token, next_sibling = np.empty((4, batch, width), np.int64)
        arrays = (np.ascontiguousarray(mask), seq_lens, positions, index, next_token, next_sibling)
        self._library.reconstruct(*(ctypes.c_void_p(a.ctypes.data) for a in arrays), batch, width)
        return positions, next_token, next_sibling
