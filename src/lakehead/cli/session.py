"""What every command shares: where it connects, how it prints, how it is registered and how it ends.

A command is a function whose first parameter is a `Session`; `command` gives it ``--uri`` and ``-o``, so that both may
stand before or after the command's name. Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import inspect
import os
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from lakehead.errors import InvalidFileError, InvalidUriError

if TYPE_CHECKING:
    from lakehead.api.connection import Connection

DEFAULT_URI = "./data"
EXIT_NOT_FOUND = 8
"""`lakehead get` found no such key; the codes below are those of `lakehead.errors`."""
EXIT_BROKEN_PIPE = 141

_Command = TypeVar("_Command", bound=Callable[..., Any])


class Output(StrEnum):
    """Forms a command can answer in."""

    text = "text"
    json = "json"


TableArgument = Annotated[str, typer.Argument(metavar="TABLE", help="database.table")]
UriOption = Annotated[
    str | None,
    typer.Option("--uri", help="A data folder or lakehead://host:port (LAKEHEAD_URI; else ./data).", metavar="URI"),
]
OutputOption = Annotated[Output | None, typer.Option("--output", "-o", help="text (default) or json.")]
ConfigOption = Annotated[
    str | None,
    typer.Option("--config", help="TOML file with [server] and [lake] (LAKEHEAD_CONFIG)."),
]


@dataclass(frozen=True)
class Session:
    """The global options of one call.

    Attributes:
        uri: a data folder or ``lakehead://host:port``.
        uri_given: it stands in the call.
        output: how results are printed.
        config: path of a TOML file; of it, a folder that this process serves takes ``[lake]``.
        tls_ca: PEM file of the authority that signed the server's certificate.
        tls_cert: PEM file of a certificate of one's own, for servers that ask for one.
        tls_key: PEM file of its key.
    """

    uri: str = DEFAULT_URI
    uri_given: bool = False
    output: Output = Output.text
    config: str | None = None
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None

    @property
    def json(self) -> bool:
        return self.output is Output.json

    def connect(self, *, create: bool = False) -> Connection:
        """Open ``uri``; the token of a server elsewhere comes from ``LAKEHEAD_TOKEN``, never from arguments, and the
        certificates of ``LAKEHEAD_URI`` from the environment, where no option names some.

        Args:
            create: make the folder when it is missing; else a missing folder, likely a slip, is an error.
        """
        import lakehead
        from lakehead.api.connection import presented
        from lakehead.config import ENVIRONMENT, load
        from lakehead.env.secret_files import SECRETS

        lake = None
        if not create and "://" not in self.uri and not os.path.isdir(os.path.expanduser(self.uri)):
            raise InvalidUriError(
                f"there is no data folder {self.uri}: name one with --uri or LAKEHEAD_URI, or begin one with"
                " 'lakehead table create'"
            )
        if not create and "://" not in self.uri and _is_others(os.path.expanduser(self.uri)):
            raise InvalidUriError(
                f"{self.uri} is no data folder, and holds other files: name one with --uri or LAKEHEAD_URI, or begin"
                " one with 'lakehead table create'"
            )
        if self.config is not None and "://" not in self.uri:
            named = {k: v for k, v in os.environ.items() if k not in ENVIRONMENT}
            toml, shared = read_config(self.config)
            lake = load(toml, named, {"listen": "127.0.0.1:0"}, self.config, SECRETS, shared).lake
        token = os.environ.get("LAKEHEAD_TOKEN") if "://" in self.uri else None
        tls = {"tls_ca": self.tls_ca, "tls_cert": self.tls_cert, "tls_key": self.tls_key}
        given = presented(self.uri, os.environ) if not any(tls.values()) else {}
        return lakehead.connect(self.uri, lake=lake, **tls | {"token": token} | given)


def _is_others(folder: str) -> bool:
    """Whether a folder holds files, and none that a data folder has from its first moment on."""
    try:
        names = set(os.listdir(folder))
    except OSError:
        return False  # which connecting says better
    return bool(names) and names.isdisjoint(("LOCK", "metadata.db"))


def read_config(path: str) -> tuple[str, bool]:
    """All text of a configuration file, and whether other users can read it.

    Raises:
        InvalidFileError: it cannot be read.
    """
    try:
        with open(path, encoding="utf-8") as f:
            return f.read(), bool(os.fstat(f.fileno()).st_mode & (stat.S_IRGRP | stat.S_IROTH))
    except (OSError, UnicodeDecodeError) as e:
        raise InvalidFileError(f"cannot read {path}: {getattr(e, 'strerror', None) or e}", path=path) from e


def command(app: typer.Typer, name: str, **settings: Any) -> Callable[[_Command], _Command]:
    """Register a function as a command; see the module."""

    def register(function: _Command) -> _Command:
        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
        keyword = inspect.Parameter.KEYWORD_ONLY
        shared = [
            inspect.Parameter("ctx", keyword, annotation=typer.Context),
            inspect.Parameter("uri", keyword, default=None, annotation=UriOption),
            inspect.Parameter("output", keyword, default=None, annotation=OutputOption),
        ]
        parameters = [p.replace(kind=keyword) for p in own] + shared

        def run(*, ctx: typer.Context, uri: str | None, output: Output | None, **values: Any) -> None:
            session: Session = ctx.find_root().obj
            given = session.uri_given or uri is not None
            session = replace(session, uri=uri or session.uri, uri_given=given, output=output or session.output)
            with quiet_broken_pipe():
                function(session, **values)
                sys.stdout.flush()

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.__doc__ = function.__doc__
        app.command(name, **settings)(run)
        return function

    return register


class quiet_broken_pipe:
    """The reader of our output has gone (``| head``): end silently, like any other filter."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, BrokenPipeError):
            # What is still buffered has nowhere to go, and Python would complain about that at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            raise typer.Exit(EXIT_BROKEN_PIPE) from error
