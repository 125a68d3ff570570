"""Interpreter of the pickles of PyTorch checkpoints.

`pickle` runs what a file names: with allowed functions only, a file can still change their attributes, hash nested
tuples for hours and allocate a memo of gigabytes. This interpreter has the opcodes that `torch.save` writes. Each takes
constant time, or time linear in the operands that it removes from the stack.
"""

import pickletools
from typing import Any, NamedTuple

from infcl_jax.runtime.printable import printable

_STRINGS = frozenset(["BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE"])
_BYTES = frozenset(["BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"])
_NUMBERS = frozenset(["BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "BINFLOAT"])
_VALUES = _STRINGS | _BYTES | _NUMBERS
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_EMPTY = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_SET": list}  # a set would hash its elements
_LONGEST_NAME = 1000  # characters of a key; an insertion compares it with an equal key
_SHOWN = 100  # characters of a name in an error


class UnsupportedError(ValueError):
    """Intact content that is not a state dict of tensors."""


class Storage(NamedTuple):
    """Reference to the elements of a tensor: class, such as "FloatStorage", member of the archive, their number."""

    kind: Any
    key: Any
    count: Any


class StridedTensor(NamedTuple):
    """Tensor as a view of a storage, as the file declares it."""

    storage: Storage
    offset: Any
    shape: Any
    strides: Any


class _Class(NamedTuple):
    """Class or function that the pickle names."""

    module: str
    name: str


def load_pickle(data: bytes) -> Any:
    """Interpret `data.pkl` of `torch.save`.

    Returns:
      Dictionaries, lists (also for sets), tuples, strings, bytes and numbers, with `StridedTensor` for tensors.
      Attributes of dictionaries, such as `_metadata` of a state dict, are dropped, as are items of dictionaries whose
      keys are no strings, such as an optimizer state's.

    Raises:
      UnsupportedError: the pickle has another class or opcode.
      ValueError: the pickle is damaged.
    """
    try:
        return _interpret(data)
    except UnsupportedError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:  # an operand is missing or wrong
        raise ValueError("a damaged pickle") from error


def _interpret(data: bytes) -> Any:
    """Run the opcodes; a wrong operand raises almost any exception."""
    stack: list[Any] = []
    outer: list[list[Any]] = []  # stacks below the marks
    memo: list[Any] = []
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name in _VALUES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            index = len(memo) if argument is None else argument
            if index > len(memo):
                raise IndexError(name)
            memo[index : index + 1] = [stack[-1]]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "MARK":
            outer.append(stack)
            stack = []
        elif name in ("TUPLE", "FROZENSET", "APPENDS", "ADDITEMS", "SETITEMS"):
            items, stack = stack, outer.pop()
            _extend(stack, name, items)
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3", "APPEND", "SETITEM"):
            count = {"APPEND": 1, "SETITEM": 2}.get(name) or int(name[-1])
            items = [stack.pop() for _ in range(count)][::-1]
            _extend(stack, name, items)
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            module, attribute = argument.split(" ") if argument else [stack.pop(), stack.pop()][::-1]
            if not type(module) is type(attribute) is str:
                raise TypeError(name)
            stack.append(_Class(module, attribute))
        elif name == "REDUCE":
            arguments, function = stack.pop(), stack.pop()
            stack.append(_call(function, arguments))
        elif name == "BUILD":
            stack.pop()
            if type(stack[-1]) is not dict:
                raise TypeError(name)
        elif name == "BINPERSID":
            _, kind, key, _, count = stack.pop()  # "storage", class, member, device, elements
            stack.append(Storage(kind.name, key, count))
        elif name == "STOP":
            return stack.pop()
        elif name not in ("PROTO", "FRAME"):
            raise UnsupportedError(f"expected the pickle of a state dict, got one with the opcode {name}")
    raise ValueError("no end")


def _extend(stack: list[Any], name: str, items: list[Any]) -> None:
    """Push a tuple, or extend the container on top of the stack."""
    if name.startswith(("TUPLE", "FROZENSET")):
        stack.append(tuple(items))
    elif name.startswith(("APPEND", "ADDITEMS")):
        list.extend(stack[-1], items)
    else:  # a key that is no string may take long to hash
        pairs = zip(items[::2], items[1::2], strict=True)
        dict.update(stack[-1], [(k, value) for k, value in pairs if type(k) is str and len(k) <= _LONGEST_NAME])


def _call(function: Any, arguments: Any) -> Any:
    """Build what an allowed function returns."""
    module, name = (function.module, function.name) if type(function) is _Class else ("", type(function).__name__)
    if (module, name) == ("collections", "OrderedDict") and arguments == ():
        return {}
    if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
        storage, offset, shape, strides = arguments[:4]
        if type(storage) is not Storage:
            raise TypeError(name)
        return StridedTensor(storage, offset, shape, strides)
    if (module, name) == ("torch._utils", "_rebuild_parameter"):
        return arguments[0]
    raise UnsupportedError(f"expected tensors only, got the class {printable(f'{module}.{name}')[:_SHOWN]}")
