"""Reader of PyTorch checkpoints without PyTorch and without running their code."""

import collections
import math
import pickle
import zipfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

_DTYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}
_STATE_KEYS = ("state_dict", "model")  # where training scripts, OpenCLIP's among them, store the model's tensors
_ADVICE = "save its state_dict with safetensors.torch.save_file, in an environment with PyTorch"


def read_torch_file(path: Path) -> dict[str, np.ndarray]:
    """Read the tensors that `torch.save` wrote.

    Only tensors, containers and numbers are unpickled: any other class of the file is an error, so no code of the file
    runs. A prefix "module." of all names, which distributed training adds, is removed.

    Args:
      path: zip file of `torch.save`: a state dict, or a dictionary with one as `state_dict` or `model`.

    Returns:
      Arrays by name.

    Raises:
      ValueError: the file has another format, or holds objects of other classes.
    """
    if not zipfile.is_zipfile(path):
        raise ValueError(f"expected a zip file of torch.save, got {path}, written before PyTorch 1.6; {_ADVICE}")
    with zipfile.ZipFile(path) as archive:
        (records, *_) = [name for name in archive.namelist() if name.endswith("data.pkl")] or [None]
        if records is None or any(name.endswith("constants.pkl") for name in archive.namelist()):
            raise ValueError(f"expected a file of torch.save, got the TorchScript archive {path}; {_ADVICE}")
        folder = records.removesuffix("data.pkl")
        if f"{folder}byteorder" in archive.namelist() and archive.read(f"{folder}byteorder") != b"little":
            raise ValueError(f"expected little-endian tensors, got big-endian ones in {path}; {_ADVICE}")
        try:
            with archive.open(records) as file:
                saved = _TensorUnpickler(file, archive, folder).load()
        except ValueError as error:
            raise ValueError(f"{error} in {path}; {_ADVICE}") from None
        except Exception as error:  # a damaged pickle raises almost any exception
            raise ValueError(f"expected a file of torch.save, got {path}: {error!r}; download it again") from error
    for key in _STATE_KEYS:
        if isinstance(saved, dict) and isinstance(saved.get(key), dict):
            saved = saved[key]
    if not isinstance(saved, dict) or not all(isinstance(value, np.ndarray) for value in saved.values()):
        raise ValueError(f"expected tensors by name, got {type(saved).__name__} in {path}; {_ADVICE}")
    prefix = "module." if all(name.startswith("module.") for name in saved) else ""
    return {name.removeprefix(prefix): value for name, value in saved.items()}


class _TensorUnpickler(pickle.Unpickler):
    """Unpickler of tensors, dictionaries and numbers only."""

    def __init__(self, file: Any, archive: zipfile.ZipFile, folder: str):
        super().__init__(file)
        self._archive, self._folder = archive, folder
        self._storages: dict[str, np.ndarray] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in of an allowed class or function."""
        allowed = {
            ("collections", "OrderedDict"): collections.OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
            ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
        }
        if module == "torch" and name in _DTYPES:
            return name
        if (module, name) not in allowed:
            raise ValueError(f"expected tensors only, got the class {module}.{name}")
        return allowed[module, name]

    def persistent_load(self, reference: Any) -> np.ndarray:
        """Return the elements of a storage, referred to as ("storage", type, key, location, count)."""
        _, kind, key, *_ = reference
        if key not in self._storages:
            data = self._archive.read(f"{self._folder}data/{key}")
            self._storages[key] = np.frombuffer(data, jnp.dtype(_DTYPES[kind]))
        return self._storages[key]


def _rebuild_tensor(storage: np.ndarray, offset: int, shape: tuple, strides: tuple, *_: Any) -> np.ndarray:
    """Return the tensor of a storage with the given strides, in elements."""
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if offset < 0 or min(strides, default=0) < 0 or (math.prod(shape) and last >= storage.size):
        raise ValueError("expected tensors inside their storages, got one beyond")
    bytes_per_step = [stride * storage.itemsize for stride in strides]
    return np.lib.stride_tricks.as_strided(storage[offset:], shape, bytes_per_step, writeable=False)


def _rebuild_parameter(tensor: np.ndarray, *_: Any) -> np.ndarray:
    return tensor
