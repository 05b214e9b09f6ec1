"""Read a pickled table of byte arrays without running anything that the file asks for.

Pickle is a programming language. CIFAR's official files need five of its names; here each stands for a plain record
made below, so that neither code of the file's choice nor numpy's own reconstruction ever runs on its data.
"""

import io
import math
import pickle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spardl.errors import DataError


class _Type:
    """Stands for `numpy.dtype`: remembers the name that it was made with."""

    def __init__(self, name: object, *rest: object) -> None:
        self.name = name.decode("ascii", "replace") if isinstance(name, bytes) else str(name)

    def __setstate__(self, state: object) -> None:
        pass


class _Array:
    """Stands for `numpy.ndarray`: takes (version, shape, type, Fortran order, content) and believes nothing."""

    values: NDArray[np.uint8] | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, fortran, content = state
        sound = isinstance(kind, _Type) and kind.name in ("u1", "uint8", "|u1") and isinstance(content, bytes)
        if not sound or fortran or len(content) != math.prod(shape) or not 0 < len(shape) < 4:
            raise pickle.UnpicklingError("it holds an array that is not of plain bytes")
        self.values = np.frombuffer(content, dtype=np.uint8).reshape(shape)


def _reconstruct(*arguments: object) -> _Array:
    return _Array()


def _encode(text: str, encoding: str = "latin1") -> bytes:
    return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], object] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Type,
    ("_codecs", "encode"): _encode,
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}") from None


def read_table(content: bytes, where: str) -> dict[str, Any]:
    """The fields of a pickled dictionary, its arrays as uint8. Anything but plain values and byte arrays is refused."""
    try:
        table = _Reader(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{where} is not a pickle such as the official files are: {reason}.") from error
    if not isinstance(table, dict):
        raise DataError(f"{where} holds a {type(table).__name__}, where the official files hold a dictionary.")
    return {_text(key): value.values if isinstance(value, _Array) else value for key, value in table.items()}


def _text(key: object) -> str:
    return key.decode("latin1") if isinstance(key, bytes) else str(key)
