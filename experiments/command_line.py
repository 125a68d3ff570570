"""Entry point of commands and benchmarks: flags and one-line errors.

Does not import JAX, which `experiments.benchmarks.open_clip` does not need.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any, get_args

from absl import app, flags, logging

from infcl_jax.runtime import printable
from infcl_jax.runtime.exit_codes import USER_ERRORS

_TRACEBACK = flags.DEFINE_bool("traceback", False, "Show the traceback of an error, not only its message.")
flags.disclaim_key_flags()  # a shared flag belongs to the command that asks for it, in its --help

_SHARED: dict[str, tuple[Any, ...]] = {  # function that defines a flag, with its arguments after the name
    "model": (
        flags.DEFINE_string,
        None,
        "Work directory of a run, or folder or Hub name of a pretrained model, see `infcl_jax.load`.",
    ),
    "source": (flags.DEFINE_string, None, "Dataset to read, see `infcl_jax.data.load_source`."),
    "split": (flags.DEFINE_string, "train", "Split of --source."),
    "output": (flags.DEFINE_string, None, "File or folder to write."),
    "data_dir": (flags.DEFINE_string, "data", "Folder of the prepared datasets."),
    "max_image_pixels": (
        flags.DEFINE_integer,
        None,
        "Largest number of pixels of an image file. Default: that of the run, or 100 million.",
        4,
    ),
    "precision": (flags.DEFINE_enum, "auto", ("auto", "bf16", "fp32"), "Dtype of the towers, as config.precision."),
}


@functools.cache
def shared_flag(name: str) -> flags.FlagHolder:
    """Define a flag that several commands have, once per process."""
    define, *arguments = _SHARED[name]
    return define(name, *arguments)


def option(default: Any, meaning: str, **settings: Any) -> Any:
    """Declare a field of a command's settings with a flag, see `define_flags`.

    Args:
      default: default of the field and of its flag; a tuple is a list of names or of positive integers.
      meaning: help of the flag.
      **settings: `known` names; `flag`, if its name is another one; further arguments of absl's definition.
    """
    return dataclasses.field(default=default, metadata={"meaning": meaning, **settings})


def define_flags(settings: type) -> Callable[..., Any]:
    """Define a flag for each `option` of a dataclass.

    Returns:
      Function that creates the settings from the flags, given the values of the other fields. It raises `ValueError`
      for a list with a wrong value.
    """
    fields = {field: dict(field.metadata) for field in dataclasses.fields(settings) if field.metadata}
    holders = {field: _define_flag(field, options) for field, options in fields.items()}

    def read(**others: Any) -> Any:
        values = {field.name: _value(field, holder) for field, holder in holders.items()}
        return settings(**values, **others)

    return read


def _define_flag(field: dataclasses.Field, options: dict[str, Any]) -> flags.FlagHolder:
    name, known = options.pop("flag", field.name), options.pop("known", None)
    default: Any = field.default
    meaning = options.pop("meaning")
    if isinstance(default, tuple):
        return flags.DEFINE_list(name, [*map(str, default)], meaning, allow_override=True)
    if known is not None:
        return flags.DEFINE_enum(name, default, list(known), meaning, allow_override=True)
    kind = (*get_args(field.type), field.type)[0]  # of `int | None`: int
    define: Any = {bool: flags.DEFINE_bool, int: flags.DEFINE_integer, float: flags.DEFINE_float}.get(
        kind, flags.DEFINE_string
    )
    return define(name, default, meaning, allow_override=True, **options)


def _value(field: dataclasses.Field, holder: flags.FlagHolder) -> Any:
    if not isinstance(field.default, tuple) or not (holder.value or field.default):
        return tuple(holder.value) if isinstance(field.default, tuple) else holder.value
    known = field.metadata.get("known")
    return integers(holder.name, holder.value) if known is None else names(holder.name, holder.value, known)


def integers(name: str, texts: Sequence[str]) -> tuple[int, ...]:
    """Parse the values of a flag that lists positive integers."""
    if not texts or not all(text.isdecimal() and int(text) for text in texts):
        raise ValueError(f"expected --{name} to be positive integers such as 1024,4096, got {','.join(texts)!r}")
    return tuple(map(int, texts))


def names(flag: str, texts: Sequence[str], known: Collection[str]) -> tuple[str, ...]:
    """Check the values of a flag that lists names."""
    unknown = [text for text in texts if text not in known]
    if unknown or not texts:
        raise ValueError(f"expected --{flag} among {', '.join(known)}, got {', '.join(unknown)!r}")
    return tuple(texts)


def one_line(error: Exception) -> str:
    """Format an error as one line, with escaped control characters."""
    return f"error: {printable.one_line(error)}"


def parse_flags(argv: list[str]) -> list[str]:
    """Parse the flags; an error exits with status 1 and one line on stderr."""
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        sys.exit(one_line(error))


def run(
    command: Callable[..., Any],
    *,
    paths: bool = False,
    parser: Callable[[list[str]], list[str]] = parse_flags,
    user_errors: tuple[type[Exception], ...] = USER_ERRORS,
    message: Callable[[Exception], str] = one_line,
) -> None:
    """Parse the flags and call `command()`.

    User errors exit with status 1 and their message on stderr. With `--traceback` they are raised.

    Args:
      command: function without arguments, or, with `paths`, of the list of arguments that are not flags.
      paths: whether the command has arguments that are not flags.
      parser: parser of the flags, for `absl.app.run`.
      user_errors: errors that a user can correct.
      message: formatter of these errors.
    """

    def main(argv: list[str]) -> None:
        logging.set_verbosity(logging.WARNING)
        printable.escape_warnings()
        try:
            if len(argv) > 1 and not paths:
                raise ValueError(f"expected flags only (--name=value), got {' '.join(argv[1:])}")
            command(*([argv[1:]] if paths else []))
        except user_errors as error:
            if _TRACEBACK.value:
                raise
            sys.exit(message(error))

    app.run(main, flags_parser=parser)
