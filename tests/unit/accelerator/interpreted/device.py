"""A pretended accelerator: tensors on it are torch's fake CUDA tensors, so torch's own rules of device, dtype and layout
hold, and each has its values beside it on the host, so that a step runs through and its result can be checked.

What makes the host wait for the device is noted in `waits`, what it copies to the device in `uploads`, and what it launches there in
`kernels`. Pinned memory is pretended too.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary
from triton.runtime.interpreter import GridExecutor

aten = torch.ops.aten
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
READS = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.is_nonzero.default,
}  # a number for the host
COPIES = {aten._to_copy.default, aten.copy_.default}
WITHOUT_KERNEL = READS | {aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default}
READ = "the host reads values"
SIZED_BY_VALUES = {aten.nonzero.default, aten.masked_select.default, aten._unique2.default}


def _is_cuda(device: object) -> bool:
    return device is not None and torch.device(device).type == "cuda"


class Device(TorchDispatchMode):
    """While entered, torch's "cuda" is this device."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.uploads: list[str] = []
        self.kernels: list[str] = []
        self._host = WeakTensorKeyDictionary()
        self._pinned = WeakTensorKeyDictionary()
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)

    def __enter__(self):
        self._fakes.__enter__()  # below this mode: it answers what is asked with a fake tensor
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._fakes.__exit__(*error)

    def on_host(self, value: object) -> object:
        """The values of a tensor on the device; anything else as it is."""
        return self._host[value] if isinstance(value, FakeTensor) else value

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        target = kwargs.get("device")
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        from_device = any(isinstance(x, FakeTensor) for x in tensors)
        if operator is torch.ops.prim.device.default and from_device:
            return operator(*args, **kwargs)
        if not from_device and not _is_cuda(target):
            pinned = kwargs.pop("pin_memory", None)
            with unset_fake_temporarily():
                made = operator(*args, **kwargs)
            if pinned:
                self._pinned[made] = True
            return made
        self._note_wait(operator, args, kwargs, tensors)
        with unset_fake_temporarily():
            on_host = {**kwargs, "device": torch.device("cpu")} if _is_cuda(target) else kwargs
            values = operator(*tree_map(self.on_host, args), **tree_map(self.on_host, on_host))
        if any(isinstance(value, torch.Tensor) and value.numel() for value in tree_leaves(values)):
            self._note_launch(operator, args, kwargs)
        if operator in READS or (from_device and target is not None and not _is_cuda(target)):
            return values
        if operator is aten.copy_.default and not isinstance(args[0], FakeTensor):
            return args[0]
        return self._on_device(operator(*args, **kwargs), values)

    def _on_device(self, fakes, values):
        pairs = zip(tree_leaves(fakes), tree_leaves(values), strict=True)
        for fake, value in pairs:
            if isinstance(fake, FakeTensor):
                assert (fake.shape, fake.dtype, fake.stride()) == (value.shape, value.dtype, value.stride())
                if fake not in self._host:
                    self._host[fake] = value
        return fakes

    def _note_wait(self, operator, args, kwargs, tensors) -> None:
        """An upload from pageable memory that is not `non_blocking` waits for all that is on the stream."""
        if operator in READS | SIZED_BY_VALUES:
            self.waits.append(f"{operator}: {READ}")
        elif operator is aten._to_copy.default:
            self._note_copy(operator, args[0], _is_cuda(kwargs.get("device", args[0].device)), kwargs)
        elif operator is aten.copy_.default:
            not_waiting = {"non_blocking": any(args[2:])}
            if not (any(args[2:]) and args[0] in self._pinned):
                self._note_copy(operator, args[1], isinstance(args[0], FakeTensor), not_waiting)
        elif operator in INDEXING and any(x.dim() and not isinstance(x, FakeTensor) for x in tensors):
            self.waits.append(f"{operator}: an index or value is uploaded")
            self.uploads.append("pageable")

    def _note_launch(self, operator, args, kwargs) -> None:
        source, to_device = args[0] if args else None, True
        if operator is aten._to_copy.default:
            to_device = _is_cuda(kwargs.get("device", source.device))
        elif operator is aten.copy_.default:
            source, to_device = args[1], isinstance(args[0], FakeTensor)
        if operator in COPIES and not isinstance(source, FakeTensor):
            self.uploads.append("pinned" if source in self._pinned else "pageable")
        elif to_device and not operator.is_view and operator not in WITHOUT_KERNEL:
            self.kernels.append(str(operator))

    def _note_copy(self, operator, source, to_device, kwargs) -> None:
        if isinstance(source, FakeTensor) and not to_device:
            self.waits.append(f"{operator}: {READ}")
        elif not isinstance(source, FakeTensor) and to_device and not kwargs.get("non_blocking"):
            self.waits.append(f"{operator}: a blocking upload")

    def run_kernels_on_host(self, monkeypatch) -> None:
        """Triton kernels, interpreted, take the values."""
        run = GridExecutor.__call__

        def on_values(executor, *args, **kwargs):
            with unset_fake_temporarily():
                return run(
                    executor, *map(self.on_host, args), **{k: self.on_host(v) for k, v in kwargs.items()}
                )

        monkeypatch.setattr(GridExecutor, "__call__", on_values)
