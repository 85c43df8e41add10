"""Reads the pickles in which torch describes tensors, and nothing else.

A pickle is a program that may import any module and call any function. The machine here has only
the instructions that build dicts, lists, tuples, numbers and strings, and a closed list of names.
Names stand for themselves: nothing is imported, and only functions of this file are called. Every
other name and instruction is refused.
"""

import pickletools
import struct
from collections.abc import Callable
from typing import IO, Any, NamedTuple, cast

import numpy as np

from specjax.checkpoints.tensors import DTYPES


class Name(NamedTuple):
    """A name that a pickle would import."""

    module: str
    name: str


class Storage(NamedTuple):
    """A run of numbers in the file that several tensors may share."""

    key: str
    dtype: np.dtype | None
    """The dtype; None: bytes, and each tensor has its own."""
    begin: int
    """Offset in elements from the beginning of what `key` names."""
    size: int
    """Number of elements."""
    whole: int
    """Number of elements of all that `key` names."""


class Strided(NamedTuple):
    """A tensor: its numbers within a storage."""

    storage: Storage
    dtype: np.dtype
    begin: int
    """Offset in elements of the storage."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Unpickled(ValueError):
    """The error of a pickle that holds more than tensors, or is damaged."""


ORDERED_DICT = Name("collections", "OrderedDict")
PARAMETER = Name("torch._utils", "_rebuild_parameter")
# Functions that make a tensor, with the least and the most arguments of each.
TENSOR = {
    Name("torch._utils", "_rebuild_tensor"): (4, 4),
    Name("torch._utils", "_rebuild_tensor_v2"): (6, 7),
    Name("torch._utils", "_rebuild_tensor_v3"): (7, 8),
}
STORAGES: dict[Name, np.dtype | None] = {
    Name("torch", f"{kind}Storage"): DTYPES[name]
    for kind, name in {
        "Double": "float64",
        "Float": "float32",
        "Half": "float16",
        "BFloat16": "bfloat16",
        "Bool": "bool",
        "Byte": "uint8",
        "Char": "int8",
        "Short": "int16",
        "Int": "int32",
        "Long": "int64",
    }.items()
}
STORAGES |= {Name("torch.storage", "UntypedStorage"): None, Name("torch", "UntypedStorage"): None}
TORCH_DTYPES = {Name("torch", name): dtype for name, dtype in DTYPES.items()}
KNOWN = {ORDERED_DICT, PARAMETER, *TENSOR, *STORAGES, *TORCH_DTYPES}

CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
NUMBERS = {"BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "LONG", "BINFLOAT", "FLOAT"}
STRINGS = {
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING"),  # Python 2's
}
LONGEST = 1 << 20  # bytes of a string; names of tensors have fewer than 200
# Instructions of a pickle, and entries of the dicts that it copies. A tensor takes about 35, so
# this is a file with 30,000 tensors; the largest models of the families here have 1,200. An
# instruction costs at most 72 bytes (an empty dict and its place on the stack).
MAX_STEPS = 1 << 20
MAX_BITS = 80  # of an integer; torch's magic number has 77
_MARK = object()


def read(stream: IO[bytes]) -> Any:
    """Read the pickle that begins here, with `Strided` for tensors.

    The stream then stands behind it.

    Raises:
      Unpickled: it needs what is not listed above, is malformed, or takes more than
        `MAX_STEPS`.
    """
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(cast(IO[bytes], _Bounded(stream))):
            machine.step(opcode.name, argument)
        (value,) = machine.stack
    except Unpickled:
        raise
    # Errors of pickletools and of the machine for bytes that are no pickle.
    except (ValueError, LookupError, TypeError, ArithmeticError, struct.error) as error:
        raise Unpickled(f"it is cut short or damaged ({type(error).__name__})") from None
    return value


class _Bounded:
    """A stream that never reads gigabytes at once."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream = stream

    def read(self, count: int) -> bytes:
        if count > LONGEST:
            raise Unpickled(f"it has a string of {count} bytes")
        return self.stream.read(count)

    def readline(self) -> bytes:
        return self.stream.readline(LONGEST)


class _Machine:
    """A stack and a memo; the module `pickletools` documents each instruction."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.steps = 0

    def count(self, steps: int) -> None:
        self.steps += steps
        if self.steps > MAX_STEPS:
            raise Unpickled(
                f"it takes more than {MAX_STEPS:,} steps, which no file of tensors does"
            )

    def step(self, opcode: str, argument: Any) -> None:
        self.count(1)
        if type(argument) is int and argument.bit_length() > MAX_BITS:
            raise Unpickled(f"it has a number of {argument.bit_length():,} bits")
        if opcode in NUMBERS or opcode in STRINGS:
            self.stack.append(argument)
        elif opcode in CONSTANTS:
            self.stack.append(CONSTANTS[opcode])
        elif (action := _ACTIONS.get(opcode)) is not None:
            action(self, argument)
        else:
            raise Unpickled(f"it has the instruction {opcode}, which no file of tensors needs")

    def marked(self) -> list[Any]:
        """Pop the values above the last mark, and the mark."""
        at = len(self.stack) - 1
        while self.stack[at] is not _MARK:  # IndexError if there is none
            at -= 1
        above = self.stack[at + 1 :]
        del self.stack[at:]
        return above

    def pop(self, count: int = 1) -> list[Any]:
        if len(self.stack) < count or any(value is _MARK for value in self.stack[-count:]):
            raise IndexError
        above = self.stack[-count:]
        del self.stack[-count:]
        return above

    def put(self, key: int | None) -> None:
        key = len(self.memo) if key is None else key
        if not _is_count(key):
            raise Unpickled("it keeps a value under an impossible number")
        self.memo[key] = self.stack[-1]

    def name(self, module: Any, name: Any) -> None:
        found = Name(module, name)
        if type(module) is not str or type(name) is not str:
            raise Unpickled("it asks for what has no name")
        if found not in KNOWN:
            wanted = f"{module}.{name}"[:100]
            raise Unpickled(f"it asks for {wanted!r}, which is not among what tensors are made of")
        self.stack.append(found)

    def fill(self, pairs: list[Any]) -> None:
        """Add pairs to the dict on top of the stack."""
        into = self.stack[-1]
        if type(into) is not dict or len(pairs) % 2:
            raise Unpickled("it puts entries into what is no dict")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            # Many longer integers share a hash, and a dict of those takes quadratic time.
            if type(key) is not str and not _is_count(key):
                raise Unpickled(f"a key of a dict is a {type(key).__name__}, not a string")
            into[key] = value

    def extend(self, values: list[Any]) -> None:
        """Add values to the list on top of the stack."""
        if type(self.stack[-1]) is not list:
            raise Unpickled("it appends to what is no list")
        self.stack[-1].extend(values)

    def reduce(self) -> None:
        function, arguments = self.pop(2)
        if type(function) is not Name or type(arguments) is not tuple:
            raise Unpickled("it calls what is no function")
        if function == ORDERED_DICT:
            self.stack.append({})
            pairs = arguments[0] if arguments else ()
            self.count(len(pairs))  # which the memo may repeat without new instructions
            for key, value in pairs:
                self.fill([key, value])
        elif function == PARAMETER and arguments and type(arguments[0]) is Strided:
            self.stack.append(arguments[0])
        elif function in TENSOR:
            least, most = TENSOR[function]
            if not least <= len(arguments) <= most:
                raise Unpickled(f"it gives {function.name} {len(arguments)} arguments")
            dtype = arguments[6] if function.name == "_rebuild_tensor_v3" else None
            storage, begin, shape, strides = arguments[:4]
            self.stack.append(_tensor(storage, begin, shape, strides, dtype))
        else:
            raise Unpickled(f"it calls {function.module}.{function.name} as it should not")

    def build(self) -> None:
        """Drop attributes of an OrderedDict, such as versions of layers."""
        self.pop()
        if type(self.stack[-1]) is not dict:
            raise Unpickled("it sets attributes of what is no dict")

    def dict_of(self, pairs: list[Any]) -> None:
        self.stack.append({})
        self.fill(pairs)


_ACTIONS: dict[str, Callable[[_Machine, Any], Any]] = {
    "PROTO": lambda m, argument: None,
    "FRAME": lambda m, argument: None,
    "STOP": lambda m, argument: None,
    "MARK": lambda m, argument: m.stack.append(_MARK),
    "POP": lambda m, argument: m.stack.pop(),
    "POP_MARK": lambda m, argument: m.marked(),
    "PUT": _Machine.put,
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "MEMOIZE": _Machine.put,
    "GET": lambda m, argument: m.stack.append(m.memo[argument]),
    "BINGET": lambda m, argument: m.stack.append(m.memo[argument]),
    "LONG_BINGET": lambda m, argument: m.stack.append(m.memo[argument]),
    "EMPTY_DICT": lambda m, argument: m.stack.append({}),
    "EMPTY_LIST": lambda m, argument: m.stack.append([]),
    "DICT": lambda m, argument: m.dict_of(m.marked()),
    "LIST": lambda m, argument: m.stack.append(m.marked()),
    "TUPLE": lambda m, argument: m.stack.append(tuple(m.marked())),
    "TUPLE1": lambda m, argument: m.stack.append(tuple(m.pop(1))),
    "TUPLE2": lambda m, argument: m.stack.append(tuple(m.pop(2))),
    "TUPLE3": lambda m, argument: m.stack.append(tuple(m.pop(3))),
    "APPEND": lambda m, argument: m.extend(m.pop()),
    "APPENDS": lambda m, argument: m.extend(m.marked()),
    "SETITEM": lambda m, argument: m.fill(m.pop(2)),
    "SETITEMS": lambda m, argument: m.fill(m.marked()),
    "GLOBAL": lambda m, argument: m.name(*argument.split(" ", 1)),
    "STACK_GLOBAL": lambda m, argument: m.name(*m.pop(2)),
    "BINPERSID": lambda m, argument: m.stack.append(_storage(*m.pop())),
    "REDUCE": lambda m, argument: m.reduce(),
    "BUILD": lambda m, argument: m.build(),
}


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _storage(pid: Any) -> Storage:
    """Read a persistent id: ("storage", class, key, device, size), and what it is a view of."""
    if type(pid) is not tuple or not 5 <= len(pid) <= 6 or pid[0] != "storage":
        raise Unpickled("it refers to what is no storage of numbers")
    _, kind, key, _, size, *view = pid
    if type(kind) is not Name or kind not in STORAGES or type(key) is not str:
        raise Unpickled("a storage has no known type or no name")
    begin, part = 0, size
    if view and view[0] is not None:
        _, begin, part = view[0]
    if not all(map(_is_count, (size, begin, part))) or begin + part > size:
        raise Unpickled(f"the storage {key[:100]!r} has an impossible size")
    return Storage(key, STORAGES[kind], begin, part, size)


def _tensor(storage: Any, begin: Any, shape: Any, strides: Any, dtype: Any) -> Strided:
    if type(storage) is not Storage:
        raise Unpickled("a tensor has no storage")
    if dtype is not None and (type(dtype) is not Name or dtype not in TORCH_DTYPES):
        raise Unpickled("a tensor has an unknown dtype")
    found = storage.dtype if dtype is None else TORCH_DTYPES[dtype]
    if found is None or (storage.dtype is not None and storage.dtype != found):
        raise Unpickled("a tensor's dtype is not that of its storage")
    size = storage.size
    if storage.dtype is None:
        size //= found.itemsize
    if (
        type(shape) is not tuple
        or type(strides) is not tuple
        or len(shape) != len(strides)
        or len(shape) > 8
        or not all(map(_is_count, (begin, *shape, *strides)))
    ):
        raise Unpickled("a tensor has an impossible shape")
    last = begin + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if 0 not in shape and last >= size:
        raise Unpickled(f"a tensor of shape {shape} reaches beyond its storage")
    return Strided(storage, found, begin, shape, strides)
