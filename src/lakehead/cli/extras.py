"""`lakehead demo`, `lakehead bench` and `lakehead warm-spark`: thin doors to long programs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from lakehead.cli.output import write_json, write_line
from lakehead.cli.session import Session, command
from lakehead.errors import MissingDependencyError

if TYPE_CHECKING:
    from lakehead.benchmarks.run import Part


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    command(app, "demo")(demo)
    command(app, "bench")(bench_with({}))
    command(app, "warm-spark")(warm_spark)


def demo(
    session: Session,
    folder: Annotated[str, typer.Argument(metavar="[FOLDER]", help="Where its data stays, to be explored.")] = (
        "./lakehead-demo"
    ),
    rows: Annotated[int | None, typer.Option(help="Flights to send; default: all.", min=1)] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Replace an earlier demo even if it was changed.")] = False,
) -> None:
    """Run the main job end to end on real data."""
    try:
        from lakehead.demo.run import run_demo
    except ModuleNotFoundError as e:
        raise MissingDependencyError(f"the demo needs {e.name}: pip install 'lakehead[demo]'") from e

    _exit(run_demo(folder, rows=rows, fresh=fresh, output=session.output.value))


def warm_spark(
    session: Session,
    folder: Annotated[
        str | None, typer.Argument(metavar="[FOLDER]", help="Where they go; default: where sessions look for them.")
    ] = None,
) -> None:
    """Have Spark's sessions begin in two thirds of the time: keep the classes that they load (200 MB)."""
    from rich.console import Console

    from lakehead.spark.class_archive import keep
    from lakehead.spark.launch import require_pyspark

    require_pyspark()
    with Console(stderr=True).status("Spark loads what it needs: up to a minute"):
        kept = keep(folder)
    if session.json:
        write_json({"path": kept, "bytes": os.path.getsize(kept)})
    else:
        write_line(f"kept in {kept} ({os.path.getsize(kept) >> 20} MiB); remove it to do without")


def bench_with(more: Mapping[str, Part], asked: Mapping[str, Part] | None = None) -> Callable[..., None]:
    """`lakehead bench`, which measures these parts, too, by their names; those of ``asked`` when they are named."""

    def bench(
        session: Session,
        rows: Annotated[int, typer.Option(help="Rows of each measurement.", min=1)] = 1_000_000,
        folder: Annotated[str | None, typer.Option(help="Where temporary data goes; default: here.")] = None,
        only: Annotated[
            list[str] | None,
            typer.Option(
                help="Only this part: embedded, loopback, smallwrites, push, fanout, lake, writers, restart, tiering,"
                " growth, spark, tiering-spark; repeat it. Without it all but the last two."
            ),
        ] = None,
        commits: Annotated[
            int, typer.Option(help="tiering: small rounds of one table, one after the other.", min=20)
        ] = 200,
        seconds: Annotated[float, typer.Option(help="tiering: least time of each load.", min=0.1)] = 20.0,
        save: Annotated[str | None, typer.Option(help="Write the results to this file, as JSON.")] = None,
        compare: Annotated[
            str | None, typer.Option(help="Tell which ratios moved since the results in this file.")
        ] = None,
    ) -> None:
        """Measure the published figures on this machine."""
        from lakehead.benchmarks.run import run_bench
        from lakehead.benchmarks.tiering_service import Sizes

        _exit(
            run_bench(
                rows=rows,
                output=session.output.value,
                folder=folder,
                only=only or (),
                sizes=Sizes(commits=commits, seconds=seconds),
                save=save,
                compare=compare,
                more=more,
                asked=asked,
            )
        )

    if more:
        bench.__doc__ = f"{bench.__doc__} Parts besides those of --only: {', '.join((*more, *(asked or {})))}."
    return bench


def _exit(code: object) -> None:
    if isinstance(code, int) and code:
        raise typer.Exit(code)
