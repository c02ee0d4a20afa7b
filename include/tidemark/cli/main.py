"""The app, its top-level commands and its error output."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from tidemark.cli.common import Consumers, EventFormat, Name, Output, OutputFormat, Transforms, folders, print_json, stderr, who
from tidemark.cli.erase import app as erase_app
from tidemark.cli.local import app as local_app
from tidemark.cli.metrics import app as metrics_app
from tidemark.cli.redrive import app as redrive_app
from tidemark.cli.retries import app as retries_app
from tidemark.cli.rewind import adopt, seek
from tidemark.cli.rewind import app as rewind_app
from tidemark.errors import TidemarkError
from tidemark.group.states import GroupState
from tidemark.profiles import Profile
from tidemark.text.storable import BIGINT

GroupName = Annotated[str, typer.Argument(help="The group's name, which may differ from its consumer's.")]
Targets = Annotated[list[str] | None, typer.Argument(metavar="[TOPIC[:0,1,5-9]]...", help="Topics or partitions (default: all).")]

app = typer.Typer(
    help="Kafka consumer groups for PySpark and Airflow, with offsets in Postgres.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
consumers_app = typer.Typer(help="Check the consumers that YAML files declare, and start new ones.", no_args_is_help=True)
sink_app = typer.Typer(help="The tables that consumers write to.", no_args_is_help=True)
groups_app = typer.Typer(help="Show and change consumer groups and their members.", no_args_is_help=True)
app.add_typer(consumers_app, name="consumers")
app.add_typer(sink_app, name="sink")
app.add_typer(groups_app, name="groups")
app.add_typer(rewind_app, name="rewind")
app.add_typer(retries_app, name="retries")
app.add_typer(redrive_app, name="redrive")
app.add_typer(erase_app, name="erase")
app.add_typer(metrics_app, name="metrics")
app.add_typer(local_app, name="local")


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"tidemark {metadata.version('tidemark')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_version)] = False,
) -> None: ...


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or an empty folder.")],
    output: Output = OutputFormat.TABLE,
) -> None:
    """Write a new project: a consumer with its transform and suite, the DAG files, a compose file."""
    from tidemark.cli.init import init as write_project

    write_project(folder, output)


@app.command()
def migrate(
    grant_to: Annotated[str | None, typer.Option(metavar="ROLE", help="Also grant this role the rights of --as, and no others.")] = None,
    as_: Annotated[list[Profile] | None, typer.Option("--as", help="A profile for --grant-to (docs/security.md). Repeatable.")] = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Migrate the database to this version's schema, and renew the grants of roles."""
    from tidemark import migrations
    from tidemark.connections import database_url

    if (grant_to is None) != (not as_):
        raise typer.BadParameter("use both or neither", param_hint="--grant-to and --as")
    applied = migrations.migrate(database_url(), by=who(), grant_to=grant_to, profiles=as_ or [])
    stderr.print("\n".join(f"applied {name}" for name in applied) or "nothing to apply: the database is current")
    if grant_to is not None:
        stderr.print(f"granted {grant_to} the rights of {', '.join(as_ or [])}", markup=False, highlight=False)
    if output is OutputFormat.JSON:
        print_json({"applied": applied} | ({"granted": {grant_to: as_}} if grant_to else {}))


@app.command()
def doctor(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Consumers to examine (default: all).")] = None,
    consumers: Consumers = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Report what will make runs fail or lose records, with the fix. Exits with 1 if something will fail."""
    from tidemark.cli.doctor import show_findings

    if not show_findings(names or [], consumers, output):
        raise typer.Exit(1)


@consumers_app.command("check")
def consumers_check(
    name: Annotated[str | None, typer.Argument(help="The consumer (default: all).")] = None,
    consumers: Consumers = None,
    transforms: Transforms = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Report all problems of consumers before they run."""
    from tidemark.cli.check import check_consumers

    if not check_consumers(name, consumers, folders(transforms), output):
        raise typer.Exit(1)


@consumers_app.command("new")
def consumers_new(
    topic: Annotated[str, typer.Argument(help="The topic to load.")],
    name: Annotated[str | None, typer.Option(help="The consumer's name (default: the topic's).", show_default=False)] = None,
    table: Annotated[
        str | None, typer.Option(metavar="SCHEMA.TABLE", help="The table (default: public, named after the consumer).")
    ] = None,
    sample: Annotated[int, typer.Option(min=1, max=10_000, help="Number of latest records to look at.")] = 100,
    consumers: Consumers = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Write a consumer without code for a topic of Avro, Protobuf or JSON: its file and a suite. Print the DDL. Overwrite nothing."""
    from tidemark.cli.sketch import new_consumer

    new_consumer(topic, name, table, sample, consumers, output)


@app.command("try")
def try_(
    name: Name,
    records: Annotated[int, typer.Option(min=1, max=1000, help="Number of records, over all partitions.")] = 20,
    consumers: Consumers = None,
    transforms: Transforms = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Show which rows a consumer would write for its topics' latest records. Writes nothing. Constraints and triggers are not checked."""
    from tidemark.cli.trial import show_trial

    show_trial(name, records, consumers, folders(transforms), output)


@sink_app.command("ddl")
def sink_ddl(
    name: Name,
    consumers: Consumers = None,
    transforms: Transforms = None,
    partitions: Annotated[
        int | None, typer.Option(min=1, help="LIST-partition the table by this many Kafka partitions, one index per writer.")
    ] = None,
) -> None:
    """Print the DDL of a consumer's table, derived from its transform's result, its schema or, for JSON, its latest records."""
    from tidemark.cli.check import print_ddl

    print_ddl(name, consumers, folders(transforms), partitions)


@sink_app.command("diff")
def sink_diff(name: Name, consumers: Consumers = None, transforms: Transforms = None, output: Output = OutputFormat.TABLE) -> None:
    """Show how a consumer's tables differ from what its transform or schema returns now, and what evolve: add would add."""
    from tidemark.cli.check import print_diff

    if not print_diff(name, consumers, folders(transforms), output):
        raise typer.Exit(1)


@app.command()
def consume(
    name: Name,
    partition: Annotated[list[str] | None, typer.Option(metavar="TOPIC[:0,1,5-9]", help="Read only these partitions. Repeatable.")] = None,
    consumers: Consumers = None,
    transforms: Transforms = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Load the records that are in the topics now, then stop."""
    from tidemark.cli.consume import consume_once

    consume_once(name, consumers, transforms or [], output, partitions=partition or [])


@app.command()
def validate(name: Name, consumers: Consumers = None, output: Output = OutputFormat.TABLE) -> None:
    """Validate the rows of runs outside Airflow that have not passed validation yet. Advances the validated offsets."""
    from tidemark.cli.validate import validate_runs

    if not validate_runs(name, consumers, output):
        raise typer.Exit(1)


@app.command()
def backfill(
    name: Name,
    rewind_id: Annotated[
        int | None, typer.Argument(metavar="[REWIND_ID]", min=1, max=BIGINT, help="The rewind (default: all that have records left).")
    ] = None,
    consumers: Consumers = None,
    transforms: Transforms = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Load the records that rewinds with --backfill skipped into the same table. May run beside the consumer's own runs."""
    from tidemark.cli.backfill import backfill_all

    backfill_all(name, rewind_id, consumers, transforms or [], output)


@app.command()
def offsets(name: Name, consumers: Consumers = None, output: Output = OutputFormat.TABLE) -> None:
    """Show position, end, lag, owner and epoch of each partition."""
    from tidemark.cli.offsets import show_offsets

    show_offsets(name, consumers, output)


@app.command()
def lag(
    name: Annotated[str | None, typer.Argument(help="The consumer's name (default: all groups).", show_default=False)] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it until interrupted, with a new sample every 5 s.")] = False,
    consumers: Consumers = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Show how far groups are behind, and whether that is a problem. Worst first."""
    from tidemark.cli.lag import show_lag

    show_lag(name, consumers, output, watch=watch)


@groups_app.command("list")
def groups_list(
    state: Annotated[list[GroupState] | None, typer.Option(help="Only groups in this state. Repeatable.")] = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """List groups and their states."""
    from tidemark.cli.groups import show_groups

    show_groups(state or [], output)


@groups_app.command("describe")
def groups_describe(group: GroupName, output: Output = OutputFormat.TABLE) -> None:
    """Show a group's state, members and assignments."""
    from tidemark.cli.groups import show_group

    show_group(group, output)


@groups_app.command("delete")
def groups_delete(group: GroupName, output: Output = OutputFormat.TABLE) -> None:
    """Delete a group without members, and its mirror in Kafka. Rows and ledger stay. A new group of that name starts without positions."""
    from tidemark.cli.groups import delete_group

    delete_group(group, output)


@groups_app.command("remove-member")
def groups_remove_member(
    group: GroupName,
    member: Annotated[list[str], typer.Argument(help="Instance id or member id, as shown by `groups describe`.")],
    reason: Annotated[str, typer.Option(help="Reason, stored with the group.")] = "removed by an operator",
    output: Output = OutputFormat.TABLE,
) -> None:
    """Remove members from a group. A member that is still running joins again; until then others get its partitions."""
    from tidemark.cli.groups import remove_members

    remove_members(group, member, reason, output)


@app.command()
def assign(
    name: Name,
    members: Annotated[int | None, typer.Option(min=1, help="Number of members (default: from the consumer's file).")] = None,
    with_: Annotated[list[str] | None, typer.Option("--with", help="The assignor (default: from the consumer's file).")] = None,
    consumers: Consumers = None,
    transforms: Transforms = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Show which member would get which partition, and which partitions would move. Changes nothing."""
    from tidemark.cli.assign import show_assignment

    show_assignment(name, members, with_, consumers, folders(transforms), output)


@app.command()
def pause(
    name: Name,
    what: Targets = None,
    reason: Annotated[str, typer.Option(help="Reason, stored with the pause.")] = "",
    consumers: Consumers = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Pause a consumer, or some of its topics or partitions, from the next batch on. `resume` ends the pause."""
    from tidemark.cli.flow import pause_reading

    pause_reading(name, what or [], reason, consumers, output)


@app.command()
def resume(name: Name, what: Targets = None, consumers: Consumers = None, output: Output = OutputFormat.TABLE) -> None:
    """End pauses of a consumer (default: all of them)."""
    from tidemark.cli.flow import resume_reading

    resume_reading(name, what or [], consumers, output)


@app.command()
def flow(
    name: Name,
    priority: Annotated[list[str] | None, typer.Option(metavar="TOPIC=N", help="Topics with higher N are read first. Repeatable.")] = None,
    max_ahead: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Maximum lead of one topic over another in event time, such as 10m, or none.")
    ] = None,
    consumers: Consumers = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Show a consumer's pauses, topic priorities and maximum lead between topics, or change the last two."""
    from tidemark.cli.flow import change_flow

    change_flow(name, priority or [], max_ahead, consumers, output)


@app.command()
def audit(name: Name, consumers: Consumers = None, output: Output = OutputFormat.TABLE) -> None:
    """Show where every record of a consumer is, and whether all records are accounted for."""
    from tidemark.cli.audit import show_audit

    if not show_audit(name, consumers, output):
        raise typer.Exit(1)


@app.command("audit-log")
def audit_log(
    since: Annotated[
        str | None, typer.Option(metavar="MOMENT", help="Only events from then on, such as 2026-03-24T14:00:00Z (default: all).")
    ] = None,
    after: Annotated[
        int | None,
        typer.Option(
            metavar="EVENT_ID",
            min=0,
            max=BIGINT,
            help="Only later events; waits for unfinished ones, so that none is missed (default: all).",
        ),
    ] = None,
    group: Annotated[str | None, typer.Option(help="Only events of this group.")] = None,
    output: Annotated[EventFormat, typer.Option("--output", help="Output format.")] = EventFormat.TABLE,
) -> None:
    """Show who did what, oldest first: rewinds, redrives, discards, edits, pauses, removals, deletions, maintenance, migrations, grants."""
    from tidemark.cli.audit_log import show_events

    show_events(since, after, group, output)


app.command()(seek)
groups_app.command()(adopt)


@app.command()
def maintain(
    keep: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="How long to keep it (default: 30d); at least TIDEMARK_KEEP_AT_LEAST (7d)."),
    ] = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Remove the archived rows of old rewinds and the payloads of failed records settled long ago. These rewinds can then be neither
    undone nor verified."""
    from tidemark.cli.maintain import maintain as tidy_up

    tidy_up(keep, output)


def main() -> None:
    """Entry point of the ``tidemark`` command. Prints a `TidemarkError`, or a data exception of Postgres, to stderr and exits with 1.

    With ``--output json``, also prints ``{"error": {"type": ..., "text": ...}}`` to stdout.
    """
    try:
        app()
    except TidemarkError as error:
        _end(getattr(error, "type", type(error).__name__), str(error))
    except Exception as error:
        if (getattr(error, "pgcode", None) or "")[:2] != "22":  # a data exception of Postgres
            raise
        _end(
            type(error).__name__,
            f"Postgres cannot compute this from what is stored: {error}. A role has stored a value that Tidemark does not store.",
        )
    except KeyboardInterrupt:
        stderr.print("interrupted")
        sys.exit(130)


def _end(kind: str, text: str) -> NoReturn:
    stderr.print(text, style="red", markup=False, highlight=False, soft_wrap=True)
    if "json" in (value for flag, value in _options(sys.argv) if flag == "--output"):
        print_json({"error": {"type": kind, "text": text}})
    sys.exit(1)


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields each argument as a flag with its value, for ``--flag value`` and ``--flag=value``."""
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        flag, equals, value = argument.partition("=")
        yield flag, value if equals else following


if __name__ == "__main__":
    main()
