"""The ``lakehead`` command: its options, its commands, and how errors end it.

Exit codes: 0 done; 1 an unexpected failure, or "no" to a question; 2 fix the call; 3 not available, try again; 4 a
newer owner exists; 5 stored data is not what was written; 6 a lake commit failed; 7 closed; 8 `get` found no such key;
130 Ctrl-C; 141 nobody reads the output any more.
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from lakehead.cli import extras, folders, granting, lake, quotas, reading, segments, server, tables, tiering, writing
from lakehead.cli.output import printable
from lakehead.cli.session import (
    DEFAULT_URI,
    EXIT_BROKEN_PIPE,
    ConfigOption,
    Output,
    OutputOption,
    Session,
    UriOption,
    quiet_broken_pipe,
)
from lakehead.errors import LakeheadError, StorageError

_UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_IN_COMMANDS = {
    "see con.tables() or create it": "see `lakehead table list`, or create it",
    "create it with lake='iceberg'": "create it with --lake iceberg",
    "configure one to use lake='iceberg'": "configure one to use --lake iceberg",
}
"""What messages advise in Python's words, and how the command line says it."""

# Plain help: rich would take 0.2 s to draw it.
app = typer.Typer(
    name="lakehead",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Tables that are a stream, a keyed table and an Iceberg table at once.",
    epilog="Exit codes: 0 done, 1 failed, 2 fix the call, 3 unavailable, 4 fenced, 5 corrupt, 6 commit failed,"
    " 7 closed, 8 no such key, 130 Ctrl-C, 141 nobody reads on.",
)
for module in (extras, server, tables, writing, reading, tiering, lake, granting, quotas, folders, segments):
    module.register(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        from lakehead import __version__

        typer.echo(f"lakehead {__version__}")
        raise typer.Exit


@app.callback()
def options(
    ctx: typer.Context,
    uri: UriOption = None,
    output: OutputOption = None,
    config: ConfigOption = None,
    tls_ca: Annotated[str | None, typer.Option(help="PEM file: use TLS and trust this authority.")] = None,
    tls_cert: Annotated[str | None, typer.Option(help="PEM file: a certificate of one's own.")] = None,
    tls_key: Annotated[str | None, typer.Option(help="PEM file: the key of that certificate.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options that come before the command; --uri and -o may follow it, too."""
    ctx.obj = Session(
        uri=uri or os.environ.get("LAKEHEAD_URI") or DEFAULT_URI,
        uri_given=uri is not None,
        output=output or Output.text,
        config=config or os.environ.get("LAKEHEAD_CONFIG"),
        tls_ca=tls_ca,
        tls_cert=tls_cert,
        tls_key=tls_key,
    )


def main(arguments: Sequence[str]) -> int:
    """Run one command; its exit code. Errors are one line on standard error, or with ``-o json`` one JSON object; what
    is logged meanwhile stands there in the same form."""
    arguments = list(arguments)
    if "--debug" in arguments:
        # May stand anywhere, as people add it to the end of the call that failed.
        arguments = ["--debug", *(a for a in arguments if a != "--debug")]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")  # where it is not UTF-8
    json = "json" in _outputs(arguments)
    with _logging_json() if json else contextlib.nullcontext():
        return _run(arguments, json=json)


def _run(arguments: Sequence[str], *, json: bool) -> int:
    try:
        code = typer.main.get_command(app).main(arguments, prog_name="lakehead", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        return 130
    except typer.Abort:
        return 130
    except SystemExit as e:  # the pipe broke while help was printed
        return EXIT_BROKEN_PIPE if e.code == 1 else int(e.code or 0)
    except Exception as e:
        return _report(e, json=json, debug=arguments[:1] == ["--debug"])


class _JsonLines(logging.Handler):
    """Writes records to standard error as JSON objects, one a line."""

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        from lakehead.cli.output import json_text

        print(json_text({"warning": {"message": record.getMessage()}}), file=sys.stderr, flush=True)


@contextlib.contextmanager
def _logging_json() -> Iterator[None]:
    """While this lasts, warnings and worse that anybody logs are lines of JSON, as standard error promises."""
    root, handler = logging.getLogger(), _JsonLines(logging.WARNING)
    root.addHandler(handler)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.removeHandler(handler)


def _outputs(arguments: Sequence[str]) -> set[str]:
    """What ``-o`` asks for, also in a call that could not be parsed."""
    after = {b for a, b in itertools.pairwise(arguments) if a in ("-o", "--output")}
    return after | {a.removeprefix(p) for a in arguments for p in ("--output=", "-o") if a.startswith(p)}


def _report(error: Exception, *, json: bool, debug: bool) -> int:
    context: dict[str, object] = {}
    kind = type(error).__name__
    if kind == "NoArgsIsHelpError":  # a group of commands was named, and none of them
        print(error)
        return 0
    if isinstance(error, OSError) and error.errno in _UNWRITTEN and error.filename is None:
        # Data folders have errors of their own: this is where the output goes.
        error = StorageError(f"the output cannot be written: {error.strerror}").with_traceback(error.__traceback__)
        kind = type(error).__name__
    if isinstance(error, LakeheadError):
        code, message, exit_code = error.code, _in_commands(error.message), error.exit_code
        context = dict(error.context)
    elif isinstance(error, typer.BadParameter.__mro__[1]):  # any misuse of options and arguments
        usage: typer.BadParameter = error  # type: ignore[assignment]
        code, message, exit_code, kind = 1000, _usage_message(usage), 2, "InvalidRequestError"
    else:
        text = str(error).strip()
        code, exit_code = LakeheadError.code, 1
        message = f"unexpected {kind}{': ' + text.splitlines()[0] if text else ''} (--debug shows where)"
    trace = "".join(traceback.format_exception(error)).splitlines() if debug else []
    if json:
        from lakehead.cli.output import json_text

        plain = {k: v if isinstance(v, str | int | float | bool | None) else str(v) for k, v in context.items()}
        told = {"code": code, "kind": kind, "message": message, "context": plain}
        shown = json_text({"error": {**told, "traceback": trace} if debug else told})
    else:
        hint = context.get("hint")
        shown = printable(f"error: {' '.join(message.split())}") + (f"\nhint: {printable(str(hint))}" if hint else "")
        shown = "\n".join([*map(printable, trace), shown])
    with contextlib.suppress(OSError):  # where nobody can be told either, the exit code is what is left
        print(shown, file=sys.stderr)
    return exit_code


def _in_commands(message: str) -> str:
    for python, command in _IN_COMMANDS.items():
        message = message.replace(python, command)
    return message


def _usage_message(error: typer.BadParameter) -> str:
    where = error.ctx.command_path if error.ctx is not None else "lakehead"
    return f"{error.format_message().rstrip('.')}; see {where} --help"


def run(*before: str) -> None:
    """Entry point of the ``lakehead`` command; these words come before those of the process."""
    _fill_standard_streams()
    code = main([*before, *sys.argv[1:]])
    try:
        with quiet_broken_pipe():
            sys.stdout.flush()
    except typer.Exit as e:
        code = e.exit_code
    sys.exit(code)


def _fill_standard_streams() -> None:
    """Where the process was started without some of them, Python has None there: what is printed goes nowhere."""
    if None in (sys.stdin, sys.stdout, sys.stderr):
        from lakehead.env.descriptors import fill_standard_descriptors

        fill_standard_descriptors()
        sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
        sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
        sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


if __name__ == "__main__":
    run()
